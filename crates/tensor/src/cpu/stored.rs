//! Elements in whichever type they are stored in: conversions, and f32 results on their way into either.
//!
//! Conversions have no branches, so that they vectorise; they give the bits that `half` gives.

use std::ops::Range;
use std::slice;

use half::bf16;

use super::rows::for_rows;
use crate::device::Device;
use crate::dtype::Dtype;

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

/// An expression where operands, each a [`Stored`] or a [`StoredRef`], are slices of the numbers that they are: compiled
/// for each combination of types.
macro_rules! as_numbers {
    ($($stored:ident($operand:ident)),+ => $value:expr) => {
        $crate::cpu::stored::as_numbers!([$($stored $operand)+] $value)
    };
    ([] $value:expr) => { $value };
    ([$stored:ident $operand:ident $($rest:ident)*] $value:expr) => {
        match $operand {
            $crate::cpu::stored::$stored::F32($operand) => $crate::cpu::stored::as_numbers!([$($rest)*] $value),
            $crate::cpu::stored::$stored::Bf16($operand) => $crate::cpu::stored::as_numbers!([$($rest)*] $value),
            $crate::cpu::stored::$stored::U32(_) => $crate::cpu::stored::not_numbers(),
        }
    };
}
pub(crate) use as_numbers;

/// A number as it is stored.
pub(crate) trait StoredNumber: Copy + Send + Sync {
    fn wide(self) -> f32;

    /// Rounded, where it has to be.
    fn of(x: f32) -> Self;
}

impl StoredNumber for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }

    #[inline(always)]
    fn of(x: f32) -> f32 {
        x
    }
}

impl StoredNumber for bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        widen(self)
    }

    #[inline(always)]
    fn of(x: f32) -> bf16 {
        round(x)
    }
}

/// Elements as they are stored.
#[derive(Clone, Copy)]
pub(crate) enum StoredRef<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    U32(&'a [u32]),
}

impl<'a> StoredRef<'a> {
    pub(crate) fn dtype(self) -> Dtype {
        match self {
            StoredRef::F32(_) => Dtype::F32,
            StoredRef::Bf16(_) => Dtype::Bf16,
            StoredRef::U32(_) => Dtype::U32,
        }
    }

    pub(crate) fn len(self) -> usize {
        match self {
            StoredRef::F32(data) => data.len(),
            StoredRef::Bf16(data) => data.len(),
            StoredRef::U32(data) => data.len(),
        }
    }

    pub(crate) fn part(self, range: Range<usize>) -> StoredRef<'a> {
        match self {
            StoredRef::F32(data) => StoredRef::F32(&data[range]),
            StoredRef::Bf16(data) => StoredRef::Bf16(&data[range]),
            StoredRef::U32(data) => StoredRef::U32(&data[range]),
        }
    }

    /// As bytes in memory.
    pub(crate) fn bytes(self) -> &'a [u8] {
        let (data, len): (*const u8, usize) = match self {
            StoredRef::F32(data) => (data.as_ptr().cast(), size_of_val(data)),
            StoredRef::Bf16(data) => (data.as_ptr().cast(), size_of_val(data)),
            StoredRef::U32(data) => (data.as_ptr().cast(), size_of_val(data)),
        };
        // SAFETY: numbers have no padding, and the borrow goes on.
        unsafe { slice::from_raw_parts(data, len) }
    }

    pub(crate) fn is_bf16(self) -> bool {
        matches!(self, StoredRef::Bf16(_))
    }
}

/// Elements to write or to add to, as they are stored. Sums are taken in f32 and rounded when they are put down.
pub(crate) enum Stored<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    U32(&'a mut [u32]),
}

#[cold]
#[track_caller]
pub(crate) fn not_numbers() -> ! {
    panic!("indices are not computed on")
}

/// `to[first..] = from[range]`, converted.
#[track_caller]
pub(crate) fn convert(device: &Device, to: Stored, from: StoredRef, first: usize, range: Range<usize>) {
    let target = first..first + range.len();
    match (to, from) {
        (Stored::F32(to), StoredRef::F32(from)) => to[target].copy_from_slice(&from[range]),
        (Stored::Bf16(to), StoredRef::Bf16(from)) => to[target].copy_from_slice(&from[range]),
        (Stored::U32(to), StoredRef::U32(from)) => to[target].copy_from_slice(&from[range]),
        (Stored::F32(to), StoredRef::Bf16(from)) => widen_all(device, &from[range], &mut to[target]),
        (Stored::Bf16(to), StoredRef::F32(from)) => round_all(device, &from[range], &mut to[target]),
        _ => not_numbers(),
    }
}

/// Elements to fill that are worth a thread.
const FILLED: usize = 1 << 17;

/// Every element of `range` becomes `value`.
pub(crate) fn fill(device: &Device, to: Stored, value: f32, range: Range<usize>) {
    // Of memory that nobody has written yet, most of the time is the system's, which makes pages for several threads at once.
    match to {
        Stored::F32(data) => for_rows(device, &mut data[range], 1, FILLED, |_, part| part.fill(value)),
        Stored::Bf16(data) => for_rows(device, &mut data[range], 1, FILLED, |_, part| part.fill(round(value))),
        Stored::U32(_) => not_numbers(),
    }
}

/// `to[i] = first + i % period`.
pub(crate) fn count_up(_: &Device, to: &mut [u32], first: u32, period: u32) {
    to.iter_mut().zip((0..period).cycle()).for_each(|(to, i)| *to = first + i);
}

/// `to = x`, or `to += x`.
pub(crate) fn put(device: &Device, mut to: Stored, x: &[f32], accumulate: bool) {
    to.put(device, x, accumulate);
}

/// `to[first..] += x[range]`.
pub(crate) fn add_range(device: &Device, to: Stored, x: &[f32], first: usize, range: Range<usize>) {
    let target = first..first + range.len();
    let mut part = match to {
        Stored::F32(data) => Stored::F32(&mut data[target]),
        Stored::Bf16(data) => Stored::Bf16(&mut data[target]),
        Stored::U32(_) => not_numbers(),
    };
    part.put(device, &x[range], true);
}

/// Elements of the f32 memory that [`Stored::by_rows`] needs for rows of `width` elements, `len` in all.
pub(crate) fn scratch_len(dtype: Dtype, width: usize, len: usize) -> usize {
    match dtype {
        Dtype::Bf16 => block_len(width).min(len),
        Dtype::F32 | Dtype::U32 => 0,
    }
}

fn block_len(width: usize) -> usize {
    (TEMPORARY / width.max(1)).max(1) * width.max(1)
}

impl<'a> Stored<'a> {
    /// Pieces of `size` elements.
    pub(crate) fn pieces(self, size: usize) -> Vec<Stored<'a>> {
        match self {
            Stored::F32(data) => data.chunks_exact_mut(size).map(Stored::F32).collect(),
            Stored::Bf16(data) => data.chunks_exact_mut(size).map(Stored::Bf16).collect(),
            Stored::U32(_) => not_numbers(),
        }
    }

    pub(crate) fn part(self, range: Range<usize>) -> Stored<'a> {
        match self {
            Stored::F32(data) => Stored::F32(&mut data[range]),
            Stored::Bf16(data) => Stored::Bf16(&mut data[range]),
            Stored::U32(data) => Stored::U32(&mut data[range]),
        }
    }

    /// As bytes in memory.
    pub(crate) fn bytes(self) -> &'a mut [u8] {
        let (data, len): (*mut u8, usize) = match self {
            Stored::F32(data) => (data.as_mut_ptr().cast(), size_of_val(data)),
            Stored::Bf16(data) => (data.as_mut_ptr().cast(), size_of_val(data)),
            Stored::U32(data) => (data.as_mut_ptr().cast(), size_of_val(data)),
        };
        // SAFETY: numbers have no padding, all bits are numbers, and the exclusive borrow goes on.
        unsafe { slice::from_raw_parts_mut(data, len) }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Stored::F32(data) => data.len(),
            Stored::Bf16(data) => data.len(),
            Stored::U32(data) => data.len(),
        }
    }

    pub(crate) fn set_to_zero(&mut self) {
        match self {
            Stored::F32(data) => data.fill(0.0),
            Stored::Bf16(data) => data.fill(bf16::ZERO),
            Stored::U32(data) => data.fill(0),
        }
    }

    pub(crate) fn write_from_fn(&mut self, f: &mut dyn FnMut(usize) -> f32) {
        match self {
            Stored::F32(data) => data.iter_mut().enumerate().for_each(|(i, x)| *x = f(i)),
            Stored::Bf16(data) => data.iter_mut().enumerate().for_each(|(i, x)| *x = round(f(i))),
            Stored::U32(_) => not_numbers(),
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
            Stored::U32(_) => not_numbers(),
        }
    }

    /// Lets `f` write all rows of `width` elements, or add to what they hold: at once where they are f32, else through
    /// `scratch`, whose length is [`scratch_len`], so many at a time as fit, at least one.
    pub(crate) fn by_rows(
        &mut self,
        device: &Device,
        (width, accumulate): (usize, bool),
        scratch: &mut [f32],
        mut f: impl FnMut(Range<usize>, &mut [f32]),
    ) {
        match self {
            Stored::F32(data) => f(0..data.len().checked_div(width).unwrap_or(0), data),
            Stored::Bf16(data) => {
                let size = block_len(width);
                for (block, first) in data.chunks_mut(size).zip((0..).step_by(size / width.max(1))) {
                    let wide = &mut scratch[..block.len()];
                    if accumulate {
                        widen_all(device, block, wide);
                    }
                    f(first..first + block.len() / width, wide);
                    round_all(device, wide, block);
                }
            }
            Stored::U32(_) => not_numbers(),
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
                let mut scratch = vec![0.0; scratch_len(Dtype::Bf16, width, rows * width)];
                Stored::Bf16(&mut data).by_rows(&device, (width, accumulate), &mut scratch, |range, run| {
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
