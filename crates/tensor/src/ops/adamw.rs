//! What an optimizer computes: the update of weights in place, and sums of squares for the gradient's norm.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use crate::cpu::adamw::{AdamW, SQUARES, Strips};
use crate::device::Device;
use crate::dtype::Dtype;
use crate::index::Index;
use crate::kernels;
use crate::tensor::Tensor;

impl AdamW {
    /// Updates as many weights as a strip is long, those from `first` on, in place: by elements of the gradient from `from`
    /// on, with the moments m and v as strips of `state`. Weights that are not f32 have a third strip, their master; a
    /// gradient that is not f32 is copied as such, as far as it is used.
    #[track_caller]
    pub fn update(
        &self,
        (weights, first): (&mut Tensor, usize),
        (gradient, from): (&Tensor, usize),
        (state, strips): (&mut Tensor, Strips),
    ) {
        with_f32(gradient, from..from + strips.len, |gradient, from| {
            kernels::adamw(weights, state, gradient, self, [first, from], strips);
        });
    }

    /// The same with the gradient as one strip more, the last.
    #[track_caller]
    pub fn update_by_strip(&self, (weights, first): (&mut Tensor, usize), (state, strips): (&mut Tensor, Strips)) {
        kernels::adamw_of_strip(weights, state, self, first, strips);
    }
}

/// Sums of squares, in f64. A tensor holds the halves of each sum as integers, the lower first: `[sums, 2]`.
#[derive(Debug)]
pub struct SquareSums(Tensor);

impl SquareSums {
    /// Elements whose squares are summed by themselves, before anything is added to that sum.
    pub const BLOCK: usize = SQUARES;

    /// So many sums of nothing.
    pub fn zeros(device: &Arc<Device>, sums: usize) -> SquareSums {
        SquareSums(Tensor::from_index(device, Index::Cycle(2 * sums, 0..1)).reshape(&[sums, 2]))
    }

    /// Adds the squares of elements `range` of `x` to sum number `sum`: the same bits for the same elements whatever the
    /// threads.
    #[track_caller]
    pub fn add(&mut self, sum: usize, x: &Tensor, range: Range<usize>) {
        let tile = range.len().max(1).next_multiple_of(Self::BLOCK);
        self.add_tiles(sum, x, range, tile);
    }

    /// The same as [`SquareSums::add`] of every `tile` elements of the range, one tile after the other, to the bit: by one
    /// kernel if `x` is f32. Otherwise it is by tile that elements are copied as such, so copies take little memory.
    ///
    /// # Panics
    /// If `tile` is not a multiple of [`SquareSums::BLOCK`].
    #[track_caller]
    pub fn add_tiles(&mut self, sum: usize, x: &Tensor, range: Range<usize>, tile: usize) {
        assert!(tile > 0 && tile.is_multiple_of(Self::BLOCK), "tiles of {tile} elements are no whole blocks");
        if x.dtype() == Dtype::F32 {
            return kernels::add_squares(&mut self.0, x, sum, range, tile);
        }
        let add = |part: Range<usize>| -> Result<(), Infallible> {
            with_f32(x, range.start + part.start..range.start + part.end, |x, first| {
                kernels::add_squares(&mut self.0, x, sum, first..first + part.len(), tile);
            });
            Ok(())
        };
        let Ok(()) = x.device().for_blocks(range.len(), tile, add);
    }

    /// What [`crate::to_host`] brings over and [`crate::Elements::into_f64s`] reads.
    pub fn tensor(&self) -> &Tensor {
        &self.0
    }
}

/// Calls `f` with an f32 tensor and the place where it holds elements `range` of `x`: `x` itself, or a copy of these where
/// it is stored in less.
#[track_caller]
fn with_f32<R>(x: &Tensor, range: Range<usize>, f: impl FnOnce(&Tensor, usize) -> R) -> R {
    if x.dtype() == Dtype::F32 {
        return f(x, range.start);
    }
    let mut wide = Tensor::stale(x.device(), &[range.len()], Dtype::F32);
    wide.copy_part(0, x, range);
    f(&wide, 0)
}
