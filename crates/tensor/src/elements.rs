//! Host memory by element type: what is behind a tensor of the host, and what crosses over from any.

use half::bf16;

use crate::dtype::Dtype;

/// Host memory by element type.
#[derive(Debug)]
pub enum Elements {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    U32(Vec<u32>),
}

impl Elements {
    pub fn dtype(&self) -> Dtype {
        match self {
            Elements::F32(_) => Dtype::F32,
            Elements::Bf16(_) => Dtype::Bf16,
            Elements::U32(_) => Dtype::U32,
        }
    }

    pub(crate) fn take(&mut self) -> Elements {
        match self {
            Elements::F32(data) => Elements::F32(std::mem::take(data)),
            Elements::Bf16(data) => Elements::Bf16(std::mem::take(data)),
            Elements::U32(data) => Elements::U32(std::mem::take(data)),
        }
    }

    /// Those of an f32 tensor.
    #[track_caller]
    pub fn into_f32s(self) -> Vec<f32> {
        match self {
            Elements::F32(data) => data,
            other => panic!("expected f32 elements, got {:?}", other.dtype()),
        }
    }

    /// Those of a tensor of integers.
    #[track_caller]
    pub fn into_u32s(self) -> Vec<u32> {
        match self {
            Elements::U32(data) => data,
            other => panic!("expected integers, got {:?}", other.dtype()),
        }
    }

    /// Those of a tensor of f64s, each as two integers, the lower half first.
    #[track_caller]
    pub fn into_f64s(self) -> Vec<f64> {
        let halves = self.into_u32s();
        let (pairs, rest) = halves.as_chunks();
        assert!(rest.is_empty(), "half an f64");
        pairs.iter().map(|&[low, high]| f64::from_bits(u64::from(high) << 32 | u64::from(low))).collect()
    }
}
