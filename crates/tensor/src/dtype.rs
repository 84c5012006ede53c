//! Storage types. Arithmetic is f32 whatever the storage, but products of which a factor is bf16 multiply bf16; integers are
//! indices and counts.

/// How a tensor's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Dtype {
    F32,
    Bf16,
    /// Indices, as kernels read them; nothing is computed on them.
    U32,
}

impl Dtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 | Dtype::U32 => 4,
            Dtype::Bf16 => 2,
        }
    }
}
