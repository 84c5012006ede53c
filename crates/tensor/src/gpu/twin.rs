//! The same kernel twice: what an accelerator's wrote against what the CPU's wrote from copies of the same operands.

use half::bf16;

use crate::dtype::Dtype;
use crate::elements::Elements;
use crate::tensor::Tensor;

/// What a kernel takes an operand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OperandKind {
    F32,
    /// f32 that nobody looks at when the kernel is done.
    Scratch,
    U32,
    /// Each as two integers, the lower half first.
    F64,
    /// f32 or bf16.
    Any,
}

impl OperandKind {
    pub(super) fn takes(self, dtype: Dtype) -> bool {
        match self {
            OperandKind::F32 | OperandKind::Scratch => dtype == Dtype::F32,
            OperandKind::U32 | OperandKind::F64 => dtype == Dtype::U32,
            OperandKind::Any => true,
        }
    }
}

/// Of the largest magnitude that the CPU wrote: two orders of summation, or two libraries' exponentials, of values of that
/// magnitude differ by some units in the last place, of 6e-8 each.
const OF_LARGEST: f64 = 1e-5;

/// Of an element itself, where it was rounded to bf16: one unit in the last place, which is most for powers of two.
const OF_BF16: f64 = 1.0 / 128.0;

/// How far an element may be off: by a part of the largest that the CPU wrote, and by so much.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TwinTolerance {
    of_largest: f64,
    absolute: f64,
}

impl Default for TwinTolerance {
    fn default() -> TwinTolerance {
        OF_LARGEST.into()
    }
}

impl From<f64> for TwinTolerance {
    fn from(of_largest: f64) -> TwinTolerance {
        TwinTolerance { of_largest, absolute: 0.0 }
    }
}

/// The tolerance of sums of elements of `terms`, which may cancel all of them to what rounding left.
pub(crate) fn sums_of(terms: &Tensor) -> TwinTolerance {
    TwinTolerance { of_largest: OF_LARGEST, absolute: OF_LARGEST * largest(&numbers(terms, OperandKind::Any)) }
}

/// The tolerance where factors are rounded to what `operand` is stored in: a number between two others goes either way.
pub(crate) fn rounding_of(operand: &Tensor) -> f64 {
    if operand.dtype() == Dtype::Bf16 { OF_BF16 } else { OF_LARGEST }
}

/// Compares what a kernel wrote with what the CPU's wrote. `tolerance` is that of f32; bf16 may be another one beside it.
///
/// # Panics
/// If an element is too far off.
#[track_caller]
pub(crate) fn compare(kernel: &str, got: &Tensor, want: &Tensor, kind: OperandKind, tolerance: TwinTolerance) {
    if kind == OperandKind::Scratch {
        return;
    }
    let (TwinTolerance { of_largest, absolute }, of_each) = match (kind, want.dtype()) {
        // Sums in f64 are taken in one order everywhere, as runs are compared by the bits of norms.
        (OperandKind::F64, _) | (_, Dtype::U32) => (0.0.into(), 0.0),
        (_, Dtype::F32) => (tolerance, 0.0),
        (_, Dtype::Bf16) => (tolerance, OF_BF16),
    };
    let (got, want) = (numbers(&got.seen_by(want.device()), kind), numbers(want, kind));
    let absolute = absolute + of_largest * largest(&want);
    for (i, (&got, &want)) in got.iter().zip(&want).enumerate() {
        let is_same = got == want || got.is_nan() && want.is_nan();
        let is_near = (got - want).abs() <= absolute + of_each * want.abs();
        assert!(is_same || is_near, "kernel `{kernel}` wrote {got:e} where the CPU's wrote {want:e}: element {i}");
    }
}

/// Of those that are finite.
fn largest(numbers: &[f64]) -> f64 {
    numbers.iter().filter(|x| x.is_finite()).fold(0.0f64, |largest, x| largest.max(x.abs()))
}

fn numbers(tensor: &Tensor, kind: OperandKind) -> Vec<f64> {
    match tensor.elements(0..tensor.len()).into_owned() {
        elements if kind == OperandKind::F64 => elements.into_f64s(),
        Elements::F32(numbers) => numbers.into_iter().map(f64::from).collect(),
        Elements::Bf16(numbers) => numbers.into_iter().map(bf16::to_f64).collect(),
        Elements::U32(numbers) => numbers.into_iter().map(f64::from).collect(),
    }
}
