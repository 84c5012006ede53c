//! Weights that other programs store in fewer bits than they are computed with: codes in one tensor and their scales in
//! another. They are read here, and never written.
//!
//! ```text
//!  MXFP4   weight [.., columns]   codes U8 [.., columns / 32, 16], two of them in a byte, the earlier in its lower half
//!                                 scales U8 [.., columns / 32], each the exponent of a power of two, plus 127
//! ```

use std::ops::Range;

use super::element::ElementType;

/// How many elements of MXFP4 share a scale.
const GROUP: usize = 32;
/// Elements of a byte of MXFP4.
const PER_BYTE: usize = 2;
/// What the lower three bits of a code of MXFP4 say; the fourth is the sign.
const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// How codes and scales come to elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightPacking {
    /// Microscaling floats of four bits (Open Compute Project 2023).
    Mxfp4,
}

/// A packed tensor's second half.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedWeight {
    pub packing: WeightPacking,
    /// The tensor that has the scales.
    pub scales: String,
}

impl WeightPacking {
    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            WeightPacking::Mxfp4 => "MXFP4",
        }
    }

    /// The type of the codes.
    pub fn codes(self) -> ElementType {
        match self {
            WeightPacking::Mxfp4 => ElementType::U8,
        }
    }

    /// Whether scales may be of a type.
    pub fn has_scales_of(self, dtype: ElementType) -> bool {
        match self {
            WeightPacking::Mxfp4 => dtype == ElementType::U8,
        }
    }

    /// The shapes of the codes and of the scales of a tensor; none if it cannot be packed so.
    pub fn shapes(self, shape: &[usize]) -> Option<[Vec<usize>; 2]> {
        let (columns, rows) = shape.split_last()?;
        match self {
            WeightPacking::Mxfp4 => columns.is_multiple_of(GROUP).then(|| {
                let scales = [rows, &[columns / GROUP]].concat();
                [[&scales[..], &[GROUP / PER_BYTE]].concat(), scales]
            }),
        }
    }

    /// The codes and the scales of elements `span` of a tensor, which are whole rows.
    pub(super) fn places(self, span: &Range<usize>) -> [Range<usize>; 2] {
        let per = |n: usize| span.start / n..span.end / n;
        match self {
            WeightPacking::Mxfp4 => [per(PER_BYTE), per(GROUP)],
        }
    }

    /// The elements that codes and scales of whole rows come to, in f32 and then rounded to a type.
    pub(super) fn unpacked(self, codes: &[u8], scales: &[f32], to: ElementType) -> Vec<u8> {
        let mut out = Vec::with_capacity(codes.len() * PER_BYTE * to.bytes());
        match self {
            WeightPacking::Mxfp4 => {
                for (codes, &scale) in codes.chunks_exact(GROUP / PER_BYTE).zip(scales) {
                    let scale = power_of_two(scale as i32 - 127);
                    let both = codes.iter().flat_map(|byte| [byte & 0xf, byte >> 4]);
                    both.for_each(|code| to.push(fp4(code) * scale, &mut out));
                }
            }
        }
        out
    }
}

fn fp4(code: u8) -> f32 {
    let value = FP4[usize::from(code & 7)];
    if code & 8 == 0 { value } else { -value }
}

/// Of exponents from -127; beyond the largest number it is infinite.
fn power_of_two(exponent: i32) -> f32 {
    f64::powi(2.0, exponent) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mxfp4_is_its_definition() {
        // A stack of matrices.
        assert_eq!(WeightPacking::Mxfp4.shapes(&[3, 5, 64]), Some([vec![3, 5, 2, 16], vec![3, 5, 2]]));
        assert_eq!(WeightPacking::Mxfp4.shapes(&[5, 48]), None);
        assert_eq!(WeightPacking::Mxfp4.places(&(64..192)), [32..96, 2..6]);
        let codes: Vec<u8> = (0..32).map(|byte| byte % 16 | (15 - byte % 16) << 4).collect();
        let read = |scales: [f32; 2]| {
            let bytes = WeightPacking::Mxfp4.unpacked(&codes, &scales, ElementType::F32);
            ElementType::F32.values(&bytes).collect::<Vec<f32>>()
        };
        let values = read([127.0, 128.0]);
        assert_eq!(values.len(), 64);
        // Code 0 and code 15 in the first byte, 1 and 14 in the second; the other group is twice as large.
        assert_eq!(values[..4], [0.0, -6.0, 0.5, -4.0]);
        assert!(values[16].is_sign_negative() && values[16] == 0.0, "code 8 is a zero below");
        assert_eq!(values[30..32], [-6.0, 0.0]);
        assert_eq!(values[34..36], [1.0, -8.0]);
        // The least scale is below the least normal number, the greatest are beyond all numbers.
        assert_eq!(read([0.0, 254.0])[2], 0.5 * f32::from_bits(1 << 22));
        assert!(read([255.0, 127.0])[2].is_infinite());
    }
}
