//! Where a parameter lives: one fact that drives its initial values, its gradient's sum, the global norm, and its
//! place in a checkpoint.

use std::ops::Range;

use guildhall_tensor::{Draws, Purpose};
use serde::{Deserialize, Serialize};

use super::Axis;

/// On which axes of the mesh the copies of a parameter differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Spread {
    /// The same on every rank.
    Replicated,
    /// Slices, one on each rank of a tensor group.
    Tensor,
    /// Whole experts, others on each of so many ranks: those of an expert group.
    Expert(usize),
    /// Slices of experts: others on each of so many ranks, and one slice on each rank of an expert-tensor group.
    ExpertTensor(usize),
}

/// The part of a tensor that a rank holds: a range along one dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    pub dim: usize,
    pub start: usize,
    pub len: usize,
}

impl Slice {
    /// Part `index` of `parts` nearly equal ones of a dim of `size`.
    pub fn share(dim: usize, size: usize, (index, parts): (usize, usize)) -> Slice {
        let start = size * index / parts;
        Slice { dim, start, len: size * (index + 1) / parts - start }
    }
}

/// A global tensor or a slice of it, and where it starts in the local parameter. A local parameter is its pieces, end to
/// end: the fused projection is `q`, `k`, `v`; a stack of experts is one piece an expert.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Name in checkpoints, on every mesh the same.
    pub name: String,
    /// Of the global tensor.
    pub shape: Vec<usize>,
    /// What is held of it; absent means all.
    pub slice: Option<Slice>,
    /// First element in the local parameter.
    pub offset: usize,
}

/// Elements that are neighbours in the global tensor and in the local parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContiguousRun {
    /// First element in the global tensor.
    pub global: usize,
    /// First element in the local parameter.
    pub local: usize,
    pub len: usize,
}

impl ContiguousRun {
    /// What of it lies within a range of local elements; nothing if none does.
    fn within(&self, range: &Range<usize>) -> Option<ContiguousRun> {
        let (start, end) = (self.local.max(range.start), (self.local + self.len).min(range.end));
        (start < end).then(|| ContiguousRun {
            global: self.global + start - self.local,
            local: start,
            len: end - start,
        })
    }
}

impl Piece {
    /// Elements held here.
    pub fn len(&self) -> usize {
        self.local_shape().iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Of what is held here.
    pub fn local_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(slice) = self.slice {
            shape[slice.dim] = slice.len;
        }
        shape
    }

    /// The piece as runs, in order.
    pub fn runs(&self) -> impl Iterator<Item = ContiguousRun> + use<> {
        self.runs_within(&(self.offset..self.offset + self.len()))
    }

    /// What of these runs lies within a range of local elements, in order.
    pub fn runs_within(&self, range: &Range<usize>) -> impl Iterator<Item = ContiguousRun> + use<> {
        let slice = self.slice.unwrap_or(Slice { dim: 0, start: 0, len: self.shape.first().copied().unwrap_or(1) });
        let size = self.shape.get(slice.dim).copied().unwrap_or(1);
        let product = |dims: &[usize]| dims.iter().product::<usize>();
        let inner = product(self.shape.get(slice.dim + 1..).unwrap_or_default());
        let (offset, len) = (self.offset, slice.len * inner);
        let run =
            move |i: usize| ContiguousRun { global: (i * size + slice.start) * inner, local: offset + i * len, len };
        let here = range.start.max(offset)..range.end.min(offset + self.len());
        // All are equally long, so none before the first need be looked at.
        let numbers =
            if here.is_empty() { 0..0 } else { (here.start - offset) / len..(here.end - offset).div_ceil(len) };
        numbers.filter_map(move |i| run(i).within(&here))
    }

    /// The piece's own stream of initial draws: by name and global element, so that no mesh changes a value.
    pub fn draws(&self, seed: u64) -> Draws {
        Draws::new(seed, Purpose::Init, fnv1a(&self.name), 0)
    }
}

/// What a local parameter is made of and who else has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    pub pieces: Vec<Piece>,
    pub spread: Spread,
    /// Whether the ranks of a tensor group, each of which has a copy, make their gradients of different tokens: these
    /// are then parts of a sum. Otherwise each makes the whole of it.
    pub partial: bool,
}

impl Placement {
    /// Whole tensors laid end to end.
    pub fn new(spread: Spread, tensors: impl IntoIterator<Item = (String, Vec<usize>)>) -> Placement {
        Placement::sliced(spread, tensors.into_iter().map(|(name, shape)| (name, shape, None)))
    }

    /// Tensors, or slices of them, laid end to end: names, global shapes, and what is held.
    pub fn sliced(spread: Spread, tensors: impl IntoIterator<Item = (String, Vec<usize>, Option<Slice>)>) -> Placement {
        let mut offset = 0;
        let place = |(name, shape, slice): (String, Vec<usize>, Option<Slice>)| {
            let piece = Piece { name, shape, slice, offset };
            offset += piece.len();
            piece
        };
        Placement { pieces: tensors.into_iter().map(place).collect(), spread, partial: false }
    }

    /// The axis whose groups hold the same copy and sum its gradient.
    pub fn holders(&self) -> Axis {
        match self.spread {
            Spread::Replicated if self.partial => Axis::World,
            Spread::Replicated | Spread::Tensor => Axis::Data,
            Spread::Expert(degree) | Spread::ExpertTensor(degree) => Axis::ExpertData(degree),
        }
    }

    /// The same with gradients that are parts of a sum over the tensor group.
    pub fn partial(self, partial: bool) -> Placement {
        Placement { partial, ..self }
    }
}

/// A 64-bit hash that will not change between releases (Fowler, Noll, Vo): initial values depend on it.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_lie_end_to_end() {
        let slice = Slice::share(1, 3, (1, 2));
        let tensors = [("a".into(), vec![2, 3], Some(slice)), ("b".into(), vec![4], None)];
        let placement = Placement::sliced(Spread::Tensor, tensors);
        assert_eq!(slice, Slice { dim: 1, start: 1, len: 2 });
        assert_eq!(placement.pieces[1], Piece { name: "b".into(), shape: vec![4], slice: None, offset: 4 });
    }

    #[test]
    fn runs_of_all_slices_are_the_tensor() {
        let shape = vec![2, 5, 3];
        for dim in 0..3 {
            let mut seen = [0; 30];
            for index in 0..3 {
                let slice = Some(Slice::share(dim, shape[dim], (index, 3)));
                let piece = Piece { name: "a".into(), shape: shape.clone(), slice, offset: 7 };
                let mut local = 7;
                for run in piece.runs() {
                    assert_eq!(run.local, local);
                    local += run.len;
                    seen[run.global..run.global + run.len].iter_mut().for_each(|n| *n += 1);
                }
                assert_eq!(local, 7 + piece.len());
                for (start, end) in (0..45).flat_map(|start| (0..45).map(move |end| (start, end))) {
                    let within: Vec<_> = piece.runs().filter_map(|run| run.within(&(start..end))).collect();
                    assert_eq!(piece.runs_within(&(start..end)).collect::<Vec<_>>(), within, "{start}..{end}");
                }
            }
            assert_eq!(seen, [1; 30]);
        }
        let whole = Piece { name: "a".into(), shape: vec![4, 2], slice: None, offset: 3 };
        assert_eq!(whole.runs().collect::<Vec<_>>(), [ContiguousRun { global: 0, local: 3, len: 8 }]);
    }

    #[test]
    fn fnv1a_gives_its_published_answers() {
        assert_eq!(fnv1a(""), 0xcbf29ce484222325);
        assert_eq!(fnv1a("foobar"), 0x85944171f73967e8);
    }
}
