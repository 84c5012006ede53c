//! Reductions over the ranks' buffers: always in rank order, block by block, in loops that vectorise.
//!
//! A block is summed over all ranks while its accumulator stays in the first-level cache, so each source is read
//! once and the result written once, whatever the number of ranks.

use half::bf16;

use crate::operation::Reduce;
use crate::payload::Kind;

/// Elements of one block: 4 KiB of f32, 8 KiB of f64.
const BLOCK: usize = 1024;

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
            fn widen(self) -> $sum {
                $widen(self)
            }
            fn narrow(sum: $sum) -> Self {
                $narrow(sum)
            }
            fn add(a: $sum, b: $sum) -> $sum {
                a + b
            }
            fn max(a: $sum, b: $sum) -> $sum {
                if a.is_nan() || a > b { a } else { b }
            }
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
            fn widen(self) -> $element {
                self
            }
            fn narrow(sum: $element) -> Self {
                sum
            }
            fn add(a: $element, b: $element) -> $element {
                a.wrapping_add(b)
            }
            fn max(a: $element, b: $element) -> $element {
                a.max(b)
            }
            fn min(a: $element, b: $element) -> $element {
                a.min(b)
            }
        }
    };
}

float_element!(f32, f32, |x| x, |x| x);
float_element!(f64, f64, |x| x, |x| x);
float_element!(bf16, f32, bf16::to_f32, bf16::from_f32);
integer_element!(u32);
integer_element!(u64);
integer_element!(u8);

/// Reduces `len` elements of `kind` over `sources`, in their order, into `target`.
///
/// # Safety
/// Every source is valid for reading and `target` for writing `len` aligned elements; nobody writes the sources
/// or touches the target meanwhile. The target may coincide exactly with one source, but not overlap partly.
pub(crate) unsafe fn reduce(
    kind: Kind,
    reduce: Reduce,
    sources: &[*const u8],
    target: *mut u8,
    len: usize,
) {
    // SAFETY: passed on unchanged from the caller.
    unsafe {
        match kind {
            Kind::F32 => reduce_as::<f32>(reduce, sources, target, len),
            Kind::F64 => reduce_as::<f64>(reduce, sources, target, len),
            Kind::Bf16 => reduce_as::<bf16>(reduce, sources, target, len),
            Kind::U32 => reduce_as::<u32>(reduce, sources, target, len),
            Kind::U64 => reduce_as::<u64>(reduce, sources, target, len),
            Kind::U8 => reduce_as::<u8>(reduce, sources, target, len),
        }
    }
}

/// # Safety
/// As for [`reduce`], with elements of type `E`.
unsafe fn reduce_as<E: Element>(
    reduce: Reduce,
    sources: &[*const u8],
    target: *mut u8,
    len: usize,
) {
    let mut sums = [E::ZERO; BLOCK];
    for start in (0..len).step_by(BLOCK) {
        let sums = &mut sums[..BLOCK.min(len - start)];
        for (index, source) in sources.iter().enumerate() {
            // SAFETY: the block lies within the `len` elements the caller vouches for; the slice ends before
            // the target is written.
            let block =
                unsafe { std::slice::from_raw_parts(source.cast::<E>().add(start), sums.len()) };
            if index == 0 {
                load(sums, block)
            } else {
                fold(reduce, sums, block)
            }
        }
        // SAFETY: as above, and no source slice is alive any more.
        let block =
            unsafe { std::slice::from_raw_parts_mut(target.cast::<E>().add(start), sums.len()) };
        store(block, sums);
    }
}

fn load<E: Element>(sums: &mut [E::Sum], block: &[E]) {
    for (sum, element) in sums.iter_mut().zip(block) {
        *sum = element.widen();
    }
}

fn fold<E: Element>(reduce: Reduce, sums: &mut [E::Sum], block: &[E]) {
    match reduce {
        Reduce::Sum => fold_with(sums, block, E::add),
        Reduce::Max => fold_with(sums, block, E::max),
        Reduce::Min => fold_with(sums, block, E::min),
    }
}

fn fold_with<E: Element>(
    sums: &mut [E::Sum],
    block: &[E],
    join: impl Fn(E::Sum, E::Sum) -> E::Sum,
) {
    for (sum, element) in sums.iter_mut().zip(block) {
        *sum = join(*sum, element.widen());
    }
}

fn store<E: Element>(block: &mut [E], sums: &[E::Sum]) {
    for (element, sum) in block.iter_mut().zip(sums) {
        *element = E::narrow(*sum);
    }
}
