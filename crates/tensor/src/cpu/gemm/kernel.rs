//! What multiplies: the kernels there are, and the choice among them.

use super::view::View;
use super::wide::multiply_widened;
use super::{Blocking, Onto, ProductBlocks, SumElement};
#[cfg(target_arch = "x86_64")]
use crate::cpu::bgemm::{Bf16Unit, bgemm};
use crate::cpu::mat::{Factor, Mat, MatMut};

/// What multiplies two matrices on this CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Products of bf16.
    #[cfg(target_arch = "x86_64")]
    Bf16(Bf16Unit),
    /// Products of bf16 where the CPU has none: its numbers are widened.
    Widened,
    F32,
}

/// What a kernel does best with whole.
pub(super) struct Division {
    /// Rows and columns of C that are in registers at once.
    pub(super) tile: [usize; 2],
    /// Whether A is packed, or read where it lies. B is always packed.
    pub(super) packs_a: bool,
}

impl Kernel {
    pub(super) fn of(a: View, b: View) -> Kernel {
        if !a.is_bf16() && !b.is_bf16() {
            return Kernel::F32;
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(unit) = Bf16Unit::of_this_cpu() {
            return Kernel::Bf16(unit);
        }
        Kernel::Widened
    }

    /// Multiply-adds from which on more than one thread works on a product.
    pub(super) fn least_shared(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Kernel::Bf16(Bf16Unit::Amx) => 1 << 21,
            _ => 1 << 18,
        }
    }

    /// Sizes of blocks for products of this kernel's type.
    pub(super) fn blocks(self, blocking: &Blocking) -> ProductBlocks {
        match self {
            Kernel::F32 => blocking.f32,
            _ => blocking.bf16,
        }
    }

    /// How a product of `cols` columns by `a` is best divided among threads.
    pub(super) fn division(self, a: Factor, cols: usize, blocks: ProductBlocks) -> Division {
        let packing = |tile| Division { tile, packs_a: true };
        #[cfg(target_arch = "x86_64")]
        {
            use crate::cpu::{sgemm_avx2, sgemm_avx512};
            if let Kernel::Bf16(unit) = self {
                return Division { tile: unit.tile(a, cols, blocks), packs_a: unit.packs(a, cols, blocks) };
            }
            if sgemm_avx512::is_supported() {
                // Numbers that are widened are packed on the way.
                let is_in_place =
                    matches!((self, a), (Kernel::F32, Factor::F32(a)) if sgemm_avx512::reads_in_place(a, cols, blocks));
                return Division { tile: sgemm_avx512::tile(is_in_place), packs_a: !is_in_place };
            }
            if sgemm_avx2::is_supported() {
                return packing([sgemm_avx2::MR, sgemm_avx2::NR]);
            }
        }
        // The crate's kernels have several; all divide these.
        packing([12, 32])
    }

    /// # Safety
    /// The matrices cover the memory their shapes and strides say, C overlaps neither factor, and the start is one of C ([`Onto`]).
    pub(super) unsafe fn multiply<T: SumElement>(
        self,
        c: MatMut<T>,
        (a, b): (Factor, Factor),
        onto: Onto<T>,
        blocks: ProductBlocks,
    ) {
        if c.rows == 0 || c.cols == 0 {
            return;
        }
        // SAFETY: the caller's promise; the CPU has been asked for its unit.
        unsafe {
            match (self, a, b) {
                (Kernel::F32, Factor::F32(a), Factor::F32(b)) => T::multiply_f32(c, a, b, onto, blocks),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Bf16(unit), ..) if a.cols() > 0 => bgemm(unit, c, (a, b), onto, blocks),
                _ => multiply_widened(c, a, b, onto, blocks),
            }
        }
    }
}

/// # Safety
/// As [`Kernel::multiply`], and C has elements.
pub(super) unsafe fn multiply(c: MatMut, a: Mat, b: Mat, onto: Onto, blocks: ProductBlocks) {
    #[cfg(target_arch = "x86_64")]
    if crate::cpu::sgemm_avx512::is_supported() && a.cols > 0 {
        // SAFETY: the CPU has been asked; the rest is the caller's promise.
        return unsafe { crate::cpu::sgemm_avx512::sgemm(c, a, b, onto, blocks) };
    }
    #[cfg(target_arch = "x86_64")]
    if crate::cpu::sgemm_avx2::is_supported() && a.cols > 0 {
        // SAFETY: as above.
        return unsafe { crate::cpu::sgemm_avx2::sgemm(c, a, b, onto, blocks) };
    }
    // SAFETY: the caller's promise.
    unsafe { multiply_by_crate(c, a, b, onto) }
}

/// # Safety
/// As `multiply`.
pub(super) unsafe fn multiply_by_crate(c: MatMut, a: Mat, b: Mat, onto: Onto) {
    let kernel = gemm_f32::gemm::f32::get_gemm_fn();
    let keep = if onto.start.is_some() { 1.0 } else { 0.0 };
    if let Some(start) = onto.start {
        // SAFETY: the caller's promise. The crate adds to what is in C alone.
        unsafe { c.fill_from(start) };
    }
    // SAFETY: strides and shapes are those of the matrices; column strides come before row strides.
    unsafe {
        kernel(
            c.rows,
            c.cols,
            a.cols,
            c.data,
            1,
            c.row_stride as isize,
            onto.start.is_some(),
            a.data,
            a.col_stride as isize,
            a.row_stride as isize,
            b.data,
            b.col_stride as isize,
            b.row_stride as isize,
            keep,
            onto.alpha,
            false,
            false,
            false,
            gemm_common::Parallelism::None,
        );
    }
}
