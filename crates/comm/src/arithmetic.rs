//! Reductions over the ranks' buffers: always in rank order, block by block, in loops that vectorise.
//!
//! A block is summed over all ranks while its sums stay in registers, so each source is read once and the result written
//! once, whatever the number of ranks. Sums in memory would be no slower by count, but stores to them hold up loads of
//! sources that lie a multiple of 4 KiB away, as large buffers do. The loops are compiled twice, for any processor and for
//! AVX2; both give the same bits, since neither fuses or reorders anything.

use half::bf16;

use crate::operation::Reduce;
use crate::payload::ElementKind;

/// Elements of one block: four AVX2 registers of f32, eight of f64.
const BLOCK: usize = 32;

/// An element that can be reduced, and what it accumulates in.
trait Element: Copy {
    type Sum: Copy;
    const ZERO: Self::Sum;
    fn widen(self) -> Self::Sum;
    fn narrow(sum: Self::Sum) -> Self;
    fn add(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn max(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    fn min(a: Self::Sum, b: Self::Sum) -> Self::Sum;
}

/// Floats pass NaN on in maxima and minima: a rank whose loss has broken must not vanish among its peers.
macro_rules! float_element {
    ($element:ty, $sum:ty, $widen:expr, $narrow:expr) => {
        impl Element for $element {
            type Sum = $sum;
            const ZERO: $sum = 0.0;
            #[inline(always)]
            fn widen(self) -> $sum {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(sum: $sum) -> Self {
                $narrow(sum)
            }
            #[inline(always)]
            fn add(a: $sum, b: $sum) -> $sum {
                a + b
            }
            #[inline(always)]
            fn max(a: $sum, b: $sum) -> $sum {
                if a.is_nan() || a > b { a } else { b }
            }
            #[inline(always)]
            fn min(a: $sum, b: $sum) -> $sum {
                if a.is_nan() || a < b { a } else { b }
            }
        }
    };
}

macro_rules! integer_element {
    ($element:ty) => {
        impl Element for $element {
            type Sum = $element;
            const ZERO: $element = 0;
            #[inline(always)]
            fn widen(self) -> $element {
                self
            }
            #[inline(always)]
            fn narrow(sum: $element) -> Self {
                sum
            }
            #[inline(always)]
            fn add(a: $element, b: $element) -> $element {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn max(a: $element, b: $element) -> $element {
                a.max(b)
            }
            #[inline(always)]
            fn min(a: $element, b: $element) -> $element {
                a.min(b)
            }
        }
    };
}

float_element!(f32, f32, |x| x, |x| x);
float_element!(f64, f64, |x| x, |x| x);
float_element!(bf16, f32, widen_bf16, round_to_bf16);
integer_element!(u32);
integer_element!(u64);
integer_element!(u8);

/// What `bf16::to_f32` gives, but for leaving a signalling NaN as it is, which saves a branch.
#[inline(always)]
fn widen_bf16(element: bf16) -> f32 {
    f32::from_bits(u32::from(element.to_bits()) << 16)
}

/// The nearest bf16, ties to even, as `bf16::from_f32` rounds; but without branches, so that it vectorises.
#[inline(always)]
fn round_to_bf16(sum: f32) -> bf16 {
    let bits = sum.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // Rounding could carry a NaN into infinity; setting its quiet bit keeps it one.
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if sum.is_nan() { quiet } else { rounded } as u16)
}

/// Reduces `len` elements of `kind` over `sources`, in their order, into `target`.
///
/// # Safety
/// Every source is valid for reading and `target` for writing `len` aligned elements; nobody writes the sources
/// or touches the target meanwhile. The target may coincide exactly with one source, but not overlap partly.
pub(crate) unsafe fn reduce(kind: ElementKind, reduce: Reduce, sources: &[*const u8], target: *mut u8, len: usize) {
    if let &[source] = sources {
        // A group of one has its sum already: going over gradients again would take as long as the optimizer's step.
        // SAFETY: passed on unchanged from the caller; the two may be the same memory.
        return unsafe { std::ptr::copy(source, target, if source == target { 0 } else { len * kind.size() }) };
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2; the rest is passed on unchanged from the caller.
        return unsafe { reduce_avx2(kind, reduce, sources, target, len) };
    }
    // SAFETY: passed on unchanged from the caller.
    unsafe { reduce_portable(kind, reduce, sources, target, len) }
}

/// # Safety
/// As for [`reduce`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn reduce_avx2(kind: ElementKind, reduce: Reduce, sources: &[*const u8], target: *mut u8, len: usize) {
    // SAFETY: passed on unchanged from the caller.
    unsafe { reduce_portable(kind, reduce, sources, target, len) }
}

/// Always inlined, like all it calls, so as to be compiled for the processor of its caller.
///
/// # Safety
/// As for [`reduce`].
#[inline(always)]
unsafe fn reduce_portable(kind: ElementKind, reduce: Reduce, sources: &[*const u8], target: *mut u8, len: usize) {
    // SAFETY: passed on unchanged from the caller.
    unsafe {
        match kind {
            ElementKind::F32 => reduce_as::<f32>(reduce, sources, target, len),
            ElementKind::F64 => reduce_as::<f64>(reduce, sources, target, len),
            ElementKind::Bf16 => reduce_as::<bf16>(reduce, sources, target, len),
            ElementKind::U32 => reduce_as::<u32>(reduce, sources, target, len),
            ElementKind::U64 => reduce_as::<u64>(reduce, sources, target, len),
            ElementKind::U8 => reduce_as::<u8>(reduce, sources, target, len),
        }
    }
}

/// # Safety
/// As for [`reduce`], with elements of type `E`.
#[inline(always)]
unsafe fn reduce_as<E: Element>(reduce: Reduce, sources: &[*const u8], target: *mut u8, len: usize) {
    // SAFETY: passed on unchanged from the caller.
    unsafe {
        match reduce {
            Reduce::Sum => join_all::<E>(E::add, sources, target, len),
            Reduce::Max => join_all::<E>(E::max, sources, target, len),
            Reduce::Min => join_all::<E>(E::min, sources, target, len),
        }
    }
}

/// # Safety
/// As for [`reduce`], with elements of type `E`.
#[inline(always)]
unsafe fn join_all<E: Element>(
    join: impl Fn(E::Sum, E::Sum) -> E::Sum + Copy,
    sources: &[*const u8],
    target: *mut u8,
    len: usize,
) {
    let whole = len - len % BLOCK;
    for start in (0..whole).step_by(BLOCK) {
        // SAFETY: the block lies within the `len` elements that the caller vouches for.
        unsafe { join_block::<E, BLOCK>(join, sources, target, start) };
    }
    for start in whole..len {
        // SAFETY: as above.
        unsafe { join_block::<E, 1>(join, sources, target, start) };
    }
}

/// # Safety
/// As for [`reduce`], with elements of type `E`, of which `N` from `start` on are there.
#[inline(always)]
unsafe fn join_block<E: Element, const N: usize>(
    join: impl Fn(E::Sum, E::Sum) -> E::Sum,
    sources: &[*const u8],
    target: *mut u8,
    start: usize,
) {
    let mut sums = [E::ZERO; N];
    for (index, source) in sources.iter().enumerate() {
        // SAFETY: the caller vouches for the block; it is read before the target is written.
        let block = unsafe { &*source.cast::<E>().add(start).cast::<[E; N]>() };
        for (sum, element) in sums.iter_mut().zip(block) {
            *sum = if index == 0 { element.widen() } else { join(*sum, element.widen()) };
        }
    }
    // SAFETY: as above, and no source block is borrowed any more.
    let block = unsafe { &mut *target.cast::<E>().add(start).cast::<[E; N]>() };
    for (element, sum) in block.iter_mut().zip(sums) {
        *element = E::narrow(sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bf16, what lies just beside it, and the ties between neighbours.
    #[test]
    fn rounding_to_bf16_is_that_of_half() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let sum = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(round_to_bf16(sum).to_bits(), bf16::from_f32(sum).to_bits(), "{sum:e}");
            }
            let element = bf16::from_bits(high);
            let (ours, theirs) = (widen_bf16(element), element.to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()));
        }
    }

    #[test]
    fn all_processors_give_the_same_bits() {
        let a: Vec<f32> = (0..3000).map(|i| (i as f32).sin() * 1e3).collect();
        let b: Vec<f32> = (0..3000).map(|i| (i as f32).cos()).collect();
        let sources = [a.as_ptr().cast(), b.as_ptr().cast(), a.as_ptr().cast()];
        let (mut chosen, mut portable) = (vec![0f32; 3000], vec![0f32; 3000]);
        // SAFETY: all vectors hold 3000 elements, and the targets are distinct from the sources.
        unsafe {
            reduce(ElementKind::F32, Reduce::Sum, &sources, chosen.as_mut_ptr().cast(), 3000);
            reduce_portable(ElementKind::F32, Reduce::Sum, &sources, portable.as_mut_ptr().cast(), 3000);
        }
        assert_eq!(chosen, portable);
    }

    #[test]
    fn one_source_is_its_own_sum() {
        let source: Vec<bf16> = (0..300).map(|i| bf16::from_f32(i as f32 - 150.0)).collect();
        let (mut target, mut same) = (vec![bf16::ZERO; 300], source.clone());
        // SAFETY: all vectors hold 300 elements; the last target is its own source.
        unsafe {
            reduce(ElementKind::Bf16, Reduce::Max, &[source.as_ptr().cast()], target.as_mut_ptr().cast(), 300);
            let own = same.as_mut_ptr();
            reduce(ElementKind::Bf16, Reduce::Sum, &[own.cast_const().cast()], own.cast(), 300);
        }
        assert_eq!([&target, &same], [&source; 2]);
    }
}
