//! Matrix products on the CPU: strided views, the choice of kernel at run time, the split over threads.
//!
//! A product of which either factor is bf16 multiplies bf16 and sums in f32; f32 numbers of the other factor are rounded.
//! Where the CPU multiplies bf16, `bgemm` runs; elsewhere the factors are widened, and sums alone may differ.
//!
//! Products of f32 run, on CPUs with AVX-512 or with AVX2, on our own kernels (`sgemm_avx512`, `sgemm_avx2`: faster than the
//! crate on the machines measured, see BENCHMARKS.md); everywhere else on the `gemm` crate's.

mod blocking;
mod inner;
mod kernel;
mod view;
mod wide;

use super::mat::{Mat, MatMut};
use crate::device::Device;
pub use blocking::{Blocking, ProductBlocks};
pub(super) use inner::InnerProducts;
use kernel::{Division, Kernel};
use view::covers;
pub(crate) use view::{Numbers, View};
pub(super) use wide::SumElement;

/// What to do with the product: `c = alpha * ab`, or `c += alpha * ab`.
#[derive(Clone, Copy)]
pub(crate) struct Into {
    pub(crate) alpha: f32,
    pub(crate) accumulate: bool,
}

/// `c = ab`.
pub(crate) const SET: Into = Into { alpha: 1.0, accumulate: false };
/// `c += ab`.
pub(crate) const ADD: Into = Into { alpha: 1.0, accumulate: true };

/// SET or ADD.
pub(crate) fn set_or_add(accumulate: bool) -> Into {
    Into { alpha: 1.0, accumulate }
}

impl Into {
    fn onto<T>(self, c: MatMut<T>) -> Onto<T> {
        Onto { alpha: self.alpha, start: self.accumulate.then(|| c.read()) }
    }
}

/// What kernels add a product to: `c = alpha * ab + start`. The start is of C's size, with numbers of a row next to each
/// other, and is C itself or overlaps it nowhere; its rows may all be one.
#[derive(Clone, Copy)]
pub(super) struct Onto<T = f32> {
    pub(super) alpha: f32,
    pub(super) start: Option<Mat<T>>,
}

impl<T: Copy> Onto<T> {
    /// Of a block of C.
    ///
    /// # Safety
    /// The block lies inside C.
    #[inline(always)]
    pub(super) unsafe fn block(self, i: usize, j: usize, rows: usize, cols: usize) -> Onto<T> {
        // SAFETY: the caller's promise; a start is of C's size.
        Onto { start: self.start.map(|start| unsafe { start.block(i, j, rows, cols) }), ..self }
    }

    /// The start of every row is this one.
    pub(super) fn row(row: &[T], rows: usize) -> Onto<T> {
        let start = Mat { data: row.as_ptr(), rows, cols: row.len(), row_stride: 0, col_stride: 1 };
        Onto { alpha: 1.0, start: Some(start) }
    }

    /// Of the terms after the first `p`, whose sums C then has.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn after_terms(self, p: usize, c: MatMut<T>) -> Onto<T> {
        if p > 0 { Onto { start: Some(c.read()), ..self } } else { self }
    }

    /// Where the start of a row's elements from `j` on lies.
    #[inline(always)]
    pub(super) fn at(self, r: usize, j: usize) -> Option<*const T> {
        self.start.map(|start| start.data.wrapping_add(r * start.row_stride + j))
    }
}

/// `c (+)= alpha * a * b` with all the device's threads. `c` has rows `stride` apart; its sums are f32, rounded once where
/// it is not.
#[track_caller]
pub(super) fn gemm<T: SumElement>(device: &Device, c: &mut [T], stride: usize, a: View, b: View, how: Into) {
    let c = mat_mut(c, stride, a, b);
    // SAFETY: `mat_mut` has checked the shapes against the memory, and the start is C.
    unsafe { gemm_onto(device, c, a, b, how.onto(c)) }
}

/// `c = a * b + row`, for every row of `c`, likewise.
#[track_caller]
pub(super) fn gemm_onto_row<T: SumElement>(device: &Device, c: &mut [T], a: View, b: View, row: &[T]) {
    let c = mat_mut(c, b.cols, a, b);
    assert_eq!(row.len(), b.cols, "a row of what it is added to");
    // SAFETY: as above; the row is of C's width, and borrowed beside C.
    unsafe { gemm_onto(device, c, a, b, Onto::row(row, a.rows)) }
}

/// # Safety
/// As [`Kernel::multiply`].
unsafe fn gemm_onto<T: SumElement>(device: &Device, c: MatMut<T>, a: View, b: View, onto: Onto<T>) {
    let kernel = Kernel::of(a, b);
    let blocks = kernel.blocks(device.blocking());
    let parts = if a.rows * a.cols * b.cols < kernel.least_shared() { 1 } else { device.threads() };
    let factors = (a.factor(), b.factor());
    if parts == 1 {
        // SAFETY: the caller's promise.
        return unsafe { kernel.multiply(c, factors, onto, blocks) };
    }
    let Division { tile: [tile_rows, tile_cols], packs_a } = kernel.division(a.factor(), b.cols, blocks);
    // Every part packs all of the operand that is not split: split the longer side, or B if nothing else is packed. Of a
    // square the columns, since tiles of 32 divide it more evenly than tiles of 14.
    let by_rows = if packs_a { a.rows > b.cols } else { b.cols < 2 * parts * tile_cols };
    let (long, tile) = if by_rows { (a.rows, tile_rows) } else { (b.cols, tile_cols) };
    // Whole register tiles for every part but the last.
    let cut = |part: usize| (long * part / parts).next_multiple_of(tile).min(long);
    // A block of nothing would begin behind the matrix.
    let runs = (0..parts).map(|part| (cut(part), cut(part + 1) - cut(part))).filter(|&(_, count)| count > 0);
    device.share(runs, |(first, count)| {
        let (left, right) = factors;
        // SAFETY: the parts are disjoint blocks of C inside the checked shapes.
        unsafe {
            if by_rows {
                let left = left.block(first, 0, count, a.cols);
                let (c, onto) = (c.block(first, 0, count, c.cols), onto.block(first, 0, count, c.cols));
                kernel.multiply(c, (left, right), onto, blocks);
            } else {
                let right = right.block(0, first, b.rows, count);
                let (c, onto) = (c.block(0, first, c.rows, count), onto.block(0, first, c.rows, count));
                kernel.multiply(c, (left, right), onto, blocks);
            }
        }
    });
}

/// The same on the calling thread alone: for kernels that are parallel outside.
#[track_caller]
pub(super) fn gemm_serial<T: SumElement>(device: &Device, c: &mut [T], stride: usize, a: View, b: View, how: Into) {
    let blocks = Kernel::of(a, b).blocks(device.blocking());
    multiply_on_thread(c, stride, a, b, how, blocks);
}

/// The same of matrices so small that it does not matter how they are divided.
#[track_caller]
fn gemm_small(c: &mut [f32], stride: usize, a: View, b: View, how: Into) {
    let blocks = Kernel::of(a, b).blocks(&Blocking::default());
    multiply_on_thread(c, stride, a, b, how, blocks);
}

#[track_caller]
fn multiply_on_thread<T: SumElement>(c: &mut [T], stride: usize, a: View, b: View, how: Into, blocks: ProductBlocks) {
    let c = mat_mut(c, stride, a, b);
    // SAFETY: `mat_mut` has checked the shapes against the memory.
    unsafe { Kernel::of(a, b).multiply(c, (a.factor(), b.factor()), how.onto(c), blocks) }
}

#[track_caller]
fn mat_mut<T>(c: &mut [T], stride: usize, a: View, b: View) -> MatMut<T> {
    assert_eq!(a.cols, b.rows, "{} x {} times {} x {}", a.rows, a.cols, b.rows, b.cols);
    assert!(b.cols <= stride || a.rows <= 1, "rows of {} overlap at stride {stride}", b.cols);
    assert!(covers(c.len(), a.rows, b.cols, stride), "{} x {} at {stride} in {}", a.rows, b.cols, c.len());
    MatMut { data: c.as_mut_ptr(), rows: a.rows, cols: b.cols, row_stride: stride }
}

#[cfg(test)]
mod tests;
