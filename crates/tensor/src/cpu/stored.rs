//! Elements in whichever type they are stored in: conversions, and f32 results on their way into either.
//!
//! Conversions have no branches, so that they vectorise; they give the bits that `half` gives.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::rows::for_rows;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tensor::Tensor;

/// Elements that a thread converts at least.
const LEAST: usize = 1 << 14;
/// Elements of the f32 memory through which bf16 is written: 1 MiB, half of a second-level cache.
const TEMPORARY: usize = 1 << 18;

#[inline(always)]
pub(crate) fn widen(element: bf16) -> f32 {
    f32::from_bits(u32::from(element.to_bits()) << 16)
}

/// To the nearest, ties to even.
#[inline(always)]
pub(crate) fn round(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // Rounding could carry a NaN into infinity; setting its quiet bit keeps it one.
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
}

/// `to = from`.
pub(crate) fn widen_all(device: &Device, from: &[bf16], to: &mut [f32]) {
    update(
        device,
        to,
        from,
        #[inline(always)]
        |to, from| *to = widen(from),
    );
}

/// `to = from`, rounded.
pub(crate) fn round_all(device: &Device, from: &[f32], to: &mut [bf16]) {
    update(
        device,
        to,
        from,
        #[inline(always)]
        |to, from| *to = round(from),
    );
}

/// `f` of every element and the one it is made of.
fn update<A: Copy + Sync, B: Send>(device: &Device, to: &mut [B], from: &[A], f: impl Fn(&mut B, A) + Sync) {
    assert_eq!(from.len(), to.len(), "as many elements");
    for_rows(
        device,
        to,
        1,
        LEAST,
        #[inline(always)]
        |first, run| run.iter_mut().zip(&from[first..]).for_each(|(to, from)| f(to, *from)),
    );
}

/// Elements to write or to add to, as they are stored. Sums are taken in f32 and rounded when they are put down.
pub(crate) enum Stored<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
}

impl<'a> Stored<'a> {
    /// Pieces of `size` elements.
    pub(crate) fn pieces(self, size: usize) -> Vec<Stored<'a>> {
        match self {
            Stored::F32(data) => data.chunks_exact_mut(size).map(Stored::F32).collect(),
            Stored::Bf16(data) => data.chunks_exact_mut(size).map(Stored::Bf16).collect(),
        }
    }

    pub(crate) fn set_to_zero(&mut self) {
        match self {
            Stored::F32(data) => data.fill(0.0),
            Stored::Bf16(data) => data.fill(bf16::ZERO),
        }
    }

    /// `self = x`, or `self += x`.
    pub(crate) fn put(&mut self, device: &Device, x: &[f32], accumulate: bool) {
        match self {
            Stored::F32(data) if !accumulate => data.copy_from_slice(x),
            Stored::F32(data) => update(
                device,
                data,
                x,
                #[inline(always)]
                |sum, x| *sum += x,
            ),
            Stored::Bf16(data) if !accumulate => round_all(device, x, data),
            Stored::Bf16(data) => update(
                device,
                data,
                x,
                #[inline(always)]
                |sum, x| *sum = round(widen(*sum) + x),
            ),
        }
    }

    /// Lets `f` write all rows of `width` elements, or add to what they hold: at once where they are f32, else so many
    /// at a time as fit into 1 MiB of f32 memory, at least one.
    pub(crate) fn by_rows(
        &mut self,
        device: &Arc<Device>,
        width: usize,
        accumulate: bool,
        mut f: impl FnMut(Range<usize>, &mut [f32]),
    ) {
        match self {
            Stored::F32(data) => f(0..data.len().checked_div(width).unwrap_or(0), data),
            Stored::Bf16(data) => {
                let size = (TEMPORARY / width.max(1)).max(1) * width.max(1);
                let mut memory = Tensor::stale(device, &[size.min(data.len())], Dtype::F32);
                for (block, first) in data.chunks_mut(size).zip((0..).step_by(size / width.max(1))) {
                    let wide = &mut memory.f32s_mut()[..block.len()];
                    if accumulate {
                        widen_all(device, block, wide);
                    }
                    f(first..first + block.len() / width, wide);
                    round_all(device, wide, block);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bf16, what lies just beside it, and the ties between neighbours.
    #[test]
    fn conversions_are_those_of_half() {
        for high in 0..=u16::MAX {
            let element = bf16::from_bits(high);
            assert!(widen(element).to_bits() == element.to_f32().to_bits() || element.is_nan(), "{element}");
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(round(x).to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
            }
        }
    }

    /// Rows that do not fit the temporary at once, are wider than it, or are none.
    #[test]
    fn rows_are_each_written_once() {
        let device = Device::new(2);
        for (rows, width) in [(1, 5), (7, TEMPORARY / 3), (3, TEMPORARY + 1), (2 * TEMPORARY + 1, 1), (0, 3)] {
            let mut data = vec![bf16::ONE; rows * width];
            for accumulate in [false, true] {
                let mut seen = 0;
                Stored::Bf16(&mut data).by_rows(&device, width, accumulate, |range, run| {
                    assert_eq!((range.start, range.len() * width), (seen, run.len()));
                    assert!(run.len() <= TEMPORARY.max(width));
                    seen = range.end;
                    run.iter_mut().for_each(|x| *x = if accumulate { *x + 1.0 } else { 2.0 });
                });
                assert_eq!(seen, rows);
                let want = bf16::from_f32(if accumulate { 3.0 } else { 2.0 });
                assert!(data.iter().all(|&x| x == want), "{rows} x {width}, {accumulate}");
            }
        }
    }
}
