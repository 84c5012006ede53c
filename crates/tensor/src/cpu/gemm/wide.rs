//! Products of bf16 by kernels of f32: factors are widened, and sums rounded, a block at a time.

use std::cell::RefCell;

use half::bf16;

use super::kernel::multiply;
use super::{Onto, ProductBlocks};
#[cfg(target_arch = "x86_64")]
use crate::cpu::bgemm::SumStore;
use crate::cpu::mat::{Factor, Mat, MatMut};
use crate::cpu::stored::{round, widen};

/// Kernels of bf16, of which other processors have none, ask more of elements.
#[cfg(not(target_arch = "x86_64"))]
pub(in crate::cpu) trait SumStore {}
#[cfg(not(target_arch = "x86_64"))]
impl<T> SumStore for T {}

/// What the elements of a product are stored as.
pub(in crate::cpu) trait SumElement: SumStore + Copy + Send + Sync {
    /// # Safety
    /// As [`Kernel::multiply`], and C has elements.
    unsafe fn multiply_f32(c: MatMut<Self>, a: Mat, b: Mat, onto: Onto<Self>, blocks: ProductBlocks);
}

impl SumElement for f32 {
    unsafe fn multiply_f32(c: MatMut, a: Mat, b: Mat, onto: Onto, blocks: ProductBlocks) {
        // SAFETY: the caller's promise.
        unsafe { multiply(c, a, b, onto, blocks) }
    }
}

impl SumElement for bf16 {
    /// Through f32, a block at a time.
    unsafe fn multiply_f32(c: MatMut<bf16>, a: Mat, b: Mat, onto: Onto<bf16>, blocks: ProductBlocks) {
        thread_local! {
            static WIDE: RefCell<Vec<f32>> = RefCell::default();
        }
        WIDE.with_borrow_mut(|space| {
            let rows = (BLOCK * BLOCK / c.cols).max(1);
            space.resize(space.len().max(rows.min(c.rows) * c.cols), 0.0);
            for i in (0..c.rows).step_by(rows) {
                let rows = rows.min(c.rows - i);
                let wide = MatMut { data: space.as_mut_ptr(), rows, cols: c.cols, row_stride: c.cols };
                // SAFETY: the blocks lie inside the matrices, and `space` has room for the sums of one.
                unsafe {
                    let alone = Onto { alpha: onto.alpha, start: None };
                    multiply(wide, a.block(i, 0, rows, a.cols), b, alone, blocks);
                    for r in 0..rows {
                        let to = c.data.add((i + r) * c.row_stride);
                        let sums = space[r * c.cols..][..c.cols].iter().enumerate();
                        match onto.at(i + r, 0) {
                            Some(start) => sums.for_each(|(j, sum)| *to.add(j) = round(widen(*start.add(j)) + sum)),
                            None => sums.for_each(|(j, sum)| *to.add(j) = round(0.0 + sum)),
                        }
                    }
                }
            }
        });
    }
}

/// Rows and columns of what is widened at once at most.
const BLOCK: usize = 512;

/// # Safety
/// As [`Kernel::multiply`], and C has elements.
pub(super) unsafe fn multiply_widened<T: SumElement>(
    c: MatMut<T>,
    a: Factor,
    b: Factor,
    onto: Onto<T>,
    blocks: ProductBlocks,
) {
    thread_local! {
        /// The factors, kept for the thread's life.
        static WIDE: RefCell<[Vec<f32>; 2]> = RefCell::default();
    }
    let k = a.cols();
    let lines = (BLOCK * BLOCK / k.max(1)).clamp(32, BLOCK);
    WIDE.with_borrow_mut(|[a_space, b_space]| {
        for j in (0..c.cols).step_by(lines) {
            let cols = lines.min(c.cols - j);
            // SAFETY: the blocks lie inside the matrices; the rest is the caller's promise.
            unsafe {
                let b = widened(b.block(0, j, k, cols), b_space);
                for i in (0..c.rows).step_by(lines) {
                    let rows = lines.min(c.rows - i);
                    let a = widened(a.block(i, 0, rows, k), a_space);
                    T::multiply_f32(c.block(i, j, rows, cols), a, b, onto.block(i, j, rows, cols), blocks);
                }
            }
        }
    });
}

/// The numbers of a factor, each one of bf16's, in memory of their own and in the order in which they lie.
///
/// # Safety
/// The matrix covers its memory.
unsafe fn widened(factor: Factor, space: &mut Vec<f32>) -> Mat {
    /// # Safety
    /// As [`widened`].
    unsafe fn each<T: Copy>(m: Mat<T>, space: &mut Vec<f32>, f: impl Fn(T) -> f32) -> Mat {
        let is_by_rows = m.col_stride == 1;
        let lines = if is_by_rows { m } else { m.transposed() };
        space.clear();
        for line in 0..lines.rows {
            // SAFETY: the line exists.
            let line = unsafe { std::slice::from_raw_parts(lines.data.add(line * lines.row_stride), lines.cols) };
            space.extend(line.iter().map(|&x| f(x)));
        }
        let wide =
            Mat { data: space.as_ptr(), rows: lines.rows, cols: lines.cols, row_stride: lines.cols, col_stride: 1 };
        if is_by_rows { wide } else { wide.transposed() }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match factor {
            Factor::F32(mat) => each(mat, space, |x| widen(round(x))),
            Factor::Bf16(mat) => each(mat, space, widen),
        }
    }
}
