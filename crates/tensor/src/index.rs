//! Indices of rows and columns, as ops take them: numbers, or, where tensors are sizes, how many there would be.

use std::ops::Range;
use std::sync::Arc;

use crate::cpu::stored::StoredRef;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::kernels;
use crate::tensor::Tensor;

/// Some indices. An op checks those that it can see.
#[derive(Clone, Debug)]
pub enum Index<'a> {
    Known(&'a [u32]),
    /// Consecutive ones.
    Run(Range<u32>),
    /// So many consecutive ones, over and over.
    Cycle(usize, Range<u32>),
    /// So many, whatever they are: only on a device without elements.
    Counted(usize),
}

impl<'a> Index<'a> {
    /// Some of them, by their places.
    ///
    /// # Panics
    /// If there are no such places.
    #[track_caller]
    pub fn part(&self, places: Range<usize>) -> Index<'a> {
        assert!(places.end <= self.len(), "places {places:?} of {}", self.len());
        match self {
            Index::Known(numbers) => Index::Known(&numbers[places]),
            Index::Run(run) => Index::Run(run.start + places.start as u32..run.start + places.end as u32),
            Index::Cycle(_, run) if run.len() == 1 => Index::Cycle(places.len(), run.clone()),
            Index::Cycle(..) => panic!("part of a cycle"),
            Index::Counted(_) => Index::Counted(places.len()),
        }
    }
}

impl Index<'_> {
    pub fn len(&self) -> usize {
        match self {
            Index::Known(numbers) => numbers.len(),
            Index::Run(run) => run.len(),
            Index::Cycle(count, _) => *count,
            Index::Counted(count) => *count,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The index at place `i`.
    ///
    /// # Panics
    /// If only their number is known.
    #[track_caller]
    pub fn at(&self, i: usize) -> u32 {
        match self {
            Index::Known(numbers) => numbers[i],
            Index::Run(run) => run.start + i as u32,
            Index::Cycle(_, run) => run.start + i as u32 % run.len() as u32,
            Index::Counted(count) => panic!("{count} indices that are nowhere"),
        }
    }

    /// Whether `holds` is true of every index that is known.
    pub(crate) fn all(&self, holds: impl Fn(u32) -> bool) -> bool {
        match self {
            Index::Known(numbers) => numbers.iter().all(|&i| holds(i)),
            // In a run the last is the largest.
            Index::Run(run) | Index::Cycle(_, run) => run.is_empty() || holds(run.start) && holds(run.end - 1),
            Index::Counted(_) => true,
        }
    }

    /// As integers on a device.
    ///
    /// # Panics
    /// If only their number is known and the device has elements.
    #[track_caller]
    pub(crate) fn on(&self, device: &Arc<Device>) -> Tensor {
        let mut tensor = Tensor::stale(device, &[self.len()], Dtype::U32);
        match self {
            Index::Known(numbers) => tensor.write(0, StoredRef::U32(numbers)),
            Index::Run(run) => kernels::count_up(&mut tensor, run.start, u32::MAX),
            Index::Cycle(_, run) => kernels::count_up(&mut tensor, run.start, run.len() as u32),
            Index::Counted(count) if device.has_data() => panic!("{count} indices that are nowhere"),
            Index::Counted(_) => {}
        }
        tensor
    }
}

impl<'a> From<&'a [u32]> for Index<'a> {
    fn from(numbers: &'a [u32]) -> Index<'a> {
        Index::Known(numbers)
    }
}

impl<'a> From<&'a Vec<u32>> for Index<'a> {
    fn from(numbers: &'a Vec<u32>) -> Index<'a> {
        Index::Known(numbers)
    }
}

impl<'a, const N: usize> From<&'a [u32; N]> for Index<'a> {
    fn from(numbers: &'a [u32; N]) -> Index<'a> {
        Index::Known(numbers)
    }
}

impl From<Range<u32>> for Index<'_> {
    fn from(run: Range<u32>) -> Self {
        Index::Run(run)
    }
}

/// Indices that are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Indices {
    Known(Vec<u32>),
    Run(Range<u32>),
    Counted(usize),
}

impl Default for Indices {
    fn default() -> Indices {
        Indices::Run(0..0)
    }
}

impl Indices {
    /// The places of these keys in ascending order; equal keys keep theirs.
    pub fn sorting<K: Ord>(keys: &[K]) -> Indices {
        let mut places: Vec<u32> = (0..keys.len() as u32).collect();
        places.sort_by_key(|&place| &keys[place as usize]);
        Indices::Known(places)
    }

    pub fn len(&self) -> usize {
        Index::from(self).len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their numbers.
    ///
    /// # Panics
    /// If nobody has written them down.
    #[track_caller]
    pub fn known(&self) -> &[u32] {
        match self {
            Indices::Known(numbers) => numbers,
            other => panic!("the numbers of {other:?}"),
        }
    }

    /// Some of them, by their places.
    ///
    /// # Panics
    /// If there are no such places.
    #[track_caller]
    pub fn part(&self, places: Range<usize>) -> Index<'_> {
        Index::from(self).part(places)
    }
}

impl<'a> From<&'a Indices> for Index<'a> {
    fn from(indices: &'a Indices) -> Index<'a> {
        match indices {
            Indices::Known(numbers) => Index::Known(numbers),
            Indices::Run(run) => Index::Run(run.clone()),
            Indices::Counted(count) => Index::Counted(*count),
        }
    }
}
