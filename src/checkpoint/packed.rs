//! Weights that other programs store in fewer bits than they are computed with: codes in one tensor and their scales in
//! another. They are read here, and never written.
//!
//! ```text
//!  MXFP4   weight [.., columns]   codes U8 [.., columns / 32, 16], two of them in a byte, the earlier in its lower half
//!                                 scales U8 [.., columns / 32], each the exponent of a power of two, plus 127
//!  FP8     weight [rows, columns] codes F8_E4M3 [rows, columns]
//!                                 scales F32 or BF16, one a block, [rows / height, columns / width], rounded up
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
    /// Floats of eight bits, with a scale for each block of so many rows and columns; the last ones may be smaller.
    Fp8 { block: [usize; 2] },
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
            WeightPacking::Fp8 { .. } => "FP8",
        }
    }

    /// The type of the codes.
    pub fn codes(self) -> ElementType {
        match self {
            WeightPacking::Mxfp4 => ElementType::U8,
            WeightPacking::Fp8 { .. } => ElementType::F8E4M3,
        }
    }

    /// Whether scales may be of a type.
    pub fn has_scales_of(self, dtype: ElementType) -> bool {
        match self {
            WeightPacking::Mxfp4 => dtype == ElementType::U8,
            WeightPacking::Fp8 { .. } => matches!(dtype, ElementType::F32 | ElementType::Bf16),
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
            WeightPacking::Fp8 { block: [height, width] } => match rows {
                [rows] => Some([shape.to_vec(), vec![rows.div_ceil(height), columns.div_ceil(width)]]),
                _ => None,
            },
        }
    }

    /// Whether parts of a tensor can be read by themselves.
    pub fn has_parts(self) -> bool {
        self == WeightPacking::Mxfp4
    }

    /// The codes and the scales of elements `span` of a tensor of a shape: of whole rows, or of all if it has no parts.
    pub(super) fn places(self, span: &Range<usize>, shape: &[usize]) -> [Range<usize>; 2] {
        let per = |n: usize| span.start / n..span.end / n;
        match self {
            WeightPacking::Mxfp4 => [per(PER_BYTE), per(GROUP)],
            WeightPacking::Fp8 { .. } => {
                let [_, scales] = self.shapes(shape).expect("packed so");
                [span.clone(), 0..scales.iter().product()]
            }
        }
    }

    /// The elements that codes and scales come to, of the places of a tensor of a shape, in f32 and then rounded to a type.
    pub(super) fn unpacked(self, (codes, scales): (&[u8], &[f32]), shape: &[usize], to: ElementType) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            WeightPacking::Mxfp4 => {
                for (codes, &scale) in codes.chunks_exact(GROUP / PER_BYTE).zip(scales) {
                    let scale = power_of_two(scale as i32 - 127);
                    let both = codes.iter().flat_map(|byte| [byte & 0xf, byte >> 4]);
                    both.for_each(|code| to.push(fp4(code) * scale, &mut out));
                }
            }
            WeightPacking::Fp8 { block: [height, width] } => {
                let columns = shape.last().copied().unwrap_or(1);
                let rows = codes.chunks_exact(columns.max(1)).enumerate();
                for (row, codes) in rows {
                    let scales = &scales[row / height * columns.div_ceil(width)..];
                    let values = self.codes().values(codes).enumerate();
                    values.for_each(|(column, code)| to.push(code * scales[column / width], &mut out));
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
        assert_eq!(WeightPacking::Mxfp4.places(&(64..192), &[5, 64]), [32..96, 2..6]);
        let codes: Vec<u8> = (0..32).map(|byte| (byte % 16) | ((15 - byte % 16) << 4)).collect();
        let read = |scales: [f32; 2]| {
            let bytes = WeightPacking::Mxfp4.unpacked((&codes, &scales), &[1, 64], ElementType::F32);
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

    #[test]
    fn blocks_of_fp8_may_be_smaller_at_the_ends() {
        let packing = WeightPacking::Fp8 { block: [2, 3] };
        let shape = [3, 4];
        assert_eq!(packing.shapes(&shape), Some([vec![3, 4], vec![2, 2]]));
        assert_eq!([packing.shapes(&[4]), packing.shapes(&[2, 3, 4])], [None, None]);
        assert_eq!(packing.places(&(0..12), &shape), [0..12, 0..4]);
        // Ones, of which each block's are another number.
        let bytes = packing.unpacked((&[0x38; 12], &[1.0, 2.0, 3.0, 4.0]), &shape, ElementType::F32);
        let values: Vec<f32> = ElementType::F32.values(&bytes).collect();
        assert_eq!(values, [1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 4.0]);
    }
}
