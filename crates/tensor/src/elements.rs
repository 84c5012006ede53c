//! Host memory by element type: what is behind a tensor of the host, and what crosses over from any.

use std::borrow::Cow;

use half::bf16;

use crate::cpu::stored::{Stored, StoredRef};
use crate::dtype::Dtype;

/// Host memory by element type.
#[derive(Debug)]
pub enum Elements {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    U32(Vec<u32>),
}

/// Elements on the host: a tensor's own where they are there, else copies.
#[derive(Debug)]
pub enum HostElements<'a> {
    F32(Cow<'a, [f32]>),
    Bf16(Cow<'a, [bf16]>),
    U32(Cow<'a, [u32]>),
}

/// Elements on the host, to write.
#[derive(Debug)]
pub enum ElementsMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    U32(&'a mut [u32]),
}

impl<'a> ElementsMut<'a> {
    /// Those of an f32 tensor.
    #[track_caller]
    pub fn into_f32s(self) -> &'a mut [f32] {
        match self {
            ElementsMut::F32(data) => data,
            _ => panic!("expected f32 elements"),
        }
    }
}

impl<'a> From<Stored<'a>> for ElementsMut<'a> {
    fn from(stored: Stored<'a>) -> ElementsMut<'a> {
        match stored {
            Stored::F32(data) => ElementsMut::F32(data),
            Stored::Bf16(data) => ElementsMut::Bf16(data),
            Stored::U32(data) => ElementsMut::U32(data),
        }
    }
}

impl From<Elements> for HostElements<'_> {
    fn from(elements: Elements) -> Self {
        match elements {
            Elements::F32(data) => HostElements::F32(data.into()),
            Elements::Bf16(data) => HostElements::Bf16(data.into()),
            Elements::U32(data) => HostElements::U32(data.into()),
        }
    }
}

impl HostElements<'_> {
    pub fn dtype(&self) -> Dtype {
        self.stored_ref().dtype()
    }

    pub fn into_owned(self) -> Elements {
        match self {
            HostElements::F32(data) => Elements::F32(data.into_owned()),
            HostElements::Bf16(data) => Elements::Bf16(data.into_owned()),
            HostElements::U32(data) => Elements::U32(data.into_owned()),
        }
    }

    pub(crate) fn stored_ref(&self) -> StoredRef<'_> {
        match self {
            HostElements::F32(data) => StoredRef::F32(data),
            HostElements::Bf16(data) => StoredRef::Bf16(data),
            HostElements::U32(data) => StoredRef::U32(data),
        }
    }

    /// Those of an f32 tensor.
    #[track_caller]
    pub fn f32s(&self) -> &[f32] {
        match self {
            HostElements::F32(data) => data,
            other => panic!("expected f32 elements, got {other:?}"),
        }
    }
}

impl Elements {
    /// So many zeros.
    pub(crate) fn zeros(dtype: Dtype, len: usize) -> Elements {
        match dtype {
            Dtype::F32 => Elements::F32(vec![0.0; len]),
            Dtype::Bf16 => Elements::Bf16(vec![bf16::ZERO; len]),
            Dtype::U32 => Elements::U32(vec![0; len]),
        }
    }

    pub(crate) fn stored_ref(&self) -> StoredRef<'_> {
        match self {
            Elements::F32(data) => StoredRef::F32(data),
            Elements::Bf16(data) => StoredRef::Bf16(data),
            Elements::U32(data) => StoredRef::U32(data),
        }
    }

    pub(crate) fn stored(&mut self) -> Stored<'_> {
        match self {
            Elements::F32(data) => Stored::F32(data),
            Elements::Bf16(data) => Stored::Bf16(data),
            Elements::U32(data) => Stored::U32(data),
        }
    }

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
