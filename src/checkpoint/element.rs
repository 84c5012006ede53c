//! What an element is in a file: the types that models are stored in, and how one becomes another.

use std::fmt;

use guildhall_tensor::Dtype;
use half::{bf16, f16};

/// The type of a tensor's elements in a file. Models compute in the first two, and have tensors of the first three.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    F32,
    Bf16,
    F16,
    /// A code of packed elements, or a scale's exponent.
    U8,
    /// Eight bits, four of them an exponent and three a mantissa, without infinities (`float8_e4m3fn`).
    F8E4M3,
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl ElementType {
    pub const ALL: [ElementType; 5] =
        [ElementType::F32, ElementType::Bf16, ElementType::F16, ElementType::U8, ElementType::F8E4M3];
    /// What weights are stored as.
    pub const OF_WEIGHTS: [ElementType; 3] = [ElementType::F32, ElementType::Bf16, ElementType::F16];

    /// Whether its elements are weights only together with scales.
    pub fn is_packed(self) -> bool {
        !ElementType::OF_WEIGHTS.contains(&self)
    }

    /// What tensors of a model are stored as.
    ///
    /// # Panics
    /// For integers, which no weight is.
    pub fn of(dtype: Dtype) -> ElementType {
        match dtype {
            Dtype::F32 => ElementType::F32,
            Dtype::Bf16 => ElementType::Bf16,
            Dtype::U32 => unreachable!("weights are numbers"),
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            ElementType::F32 => 4,
            ElementType::Bf16 | ElementType::F16 => 2,
            ElementType::U8 | ElementType::F8E4M3 => 1,
        }
    }

    /// The name in headers of safetensors files.
    pub fn name(self) -> &'static str {
        match self {
            ElementType::F32 => "F32",
            ElementType::Bf16 => "BF16",
            ElementType::F16 => "F16",
            ElementType::U8 => "U8",
            ElementType::F8E4M3 => "F8_E4M3",
        }
    }

    /// The values of elements as they are in a file. All types have all their values in f32.
    pub fn values(self, bytes: &[u8]) -> Box<dyn Iterator<Item = f32> + '_> {
        match self {
            ElementType::F32 => Box::new(bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word))),
            ElementType::Bf16 => Box::new(bytes.as_chunks().0.iter().map(|&half| bf16::from_le_bytes(half).to_f32())),
            ElementType::F16 => Box::new(bytes.as_chunks().0.iter().map(|&half| f16::from_le_bytes(half).to_f32())),
            ElementType::U8 => Box::new(bytes.iter().map(|&byte| f32::from(byte))),
            ElementType::F8E4M3 => Box::new(bytes.iter().map(|&byte| f8_e4m3(byte))),
        }
    }

    /// Elements of this type as those of another: the nearest there are, of two the even one.
    pub fn converted(self, bytes: Vec<u8>, to: ElementType) -> Vec<u8> {
        if self == to {
            return bytes;
        }
        let mut out = Vec::with_capacity(bytes.len() / self.bytes() * to.bytes());
        self.values(&bytes).for_each(|value| to.push(value, &mut out));
        out
    }

    /// Appends the element of this type that is nearest to a value.
    ///
    /// # Panics
    /// For types that weights are not stored as.
    pub(super) fn push(self, value: f32, out: &mut Vec<u8>) {
        match self {
            ElementType::F32 => out.extend_from_slice(&value.to_le_bytes()),
            ElementType::Bf16 => out.extend_from_slice(&bf16::from_f32(value).to_le_bytes()),
            ElementType::F16 => out.extend_from_slice(&f16::from_f32(value).to_le_bytes()),
            ElementType::U8 | ElementType::F8E4M3 => unreachable!("packed elements are not written"),
        }
    }

    /// Whether elements are neither infinite nor NaN: training never writes such.
    pub fn are_finite(self, bytes: &[u8]) -> bool {
        match self {
            ElementType::F32 => bytes.as_chunks().0.iter().all(|&word| f32::from_le_bytes(word).is_finite()),
            ElementType::Bf16 => bytes.as_chunks().0.iter().all(|&half| bf16::from_le_bytes(half).is_finite()),
            ElementType::F16 => bytes.as_chunks().0.iter().all(|&half| f16::from_le_bytes(half).is_finite()),
            ElementType::U8 => true,
            ElementType::F8E4M3 => bytes.iter().all(|&byte| f8_e4m3(byte).is_finite()),
        }
    }
}

/// The number that eight bits are: a sign, an exponent plus 7, a mantissa. All ones behind the sign are no number.
fn f8_e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 0xf), f32::from(byte & 7));
    let size = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * f32::powi(2.0, -6),
        _ => (1.0 + mantissa / 8.0) * f32::powi(2.0, exponent - 7),
    };
    if byte & 0x80 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bits_are_the_numbers_of_their_definition() {
        let of = |bytes: &[u8]| ElementType::F8E4M3.values(bytes).collect::<Vec<f32>>();
        // One, the least above zero, the greatest below normal ones, the least normal one, the greatest, and one below zero.
        let want = [1.0, 1.0 / 512.0, 7.0 / 512.0, 1.0 / 64.0, 448.0, -1.125];
        assert_eq!(of(&[0x38, 0x01, 0x07, 0x08, 0x7e, 0xb9]), want);
        assert!(of(&[0x80])[0].is_sign_negative() && of(&[0x80])[0] == 0.0);
        assert!(of(&[0x7f, 0xff]).iter().all(|value| value.is_nan()));
        assert!(ElementType::F8E4M3.are_finite(&[0x7e, 0xfe]) && !ElementType::F8E4M3.are_finite(&[0, 0xff]));
    }
}
