//! Row-parallel loops: outputs are cut into runs of whole rows, one run a thread or a few, each compiled for the best
//! instruction set the CPU has.

use std::ops::Range;

use super::stored::StoredNumber;
use crate::device::Device;

/// Runs `f` compiled with the widest vectors this CPU has. `f` and what it calls must inline for that to matter.
#[inline(always)]
pub(crate) fn simd<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// Asks for the memory at `place`, which may lie past the end, to be brought near. The hardware looks ahead within a
/// page; rows that fill pages need telling.
#[inline(always)]
pub(crate) fn prefetch(place: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing and faults nowhere.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// The same for `len` elements from `place` on.
#[inline(always)]
pub(crate) fn prefetch_run(place: *const f32, len: usize) {
    for line in (0..len).step_by(16) {
        prefetch(place.wrapping_add(line));
    }
}

/// Asks for the memory 2 KiB ahead of these elements, for as much as they take themselves but for no more than a part of the
/// nearest cache: loops that go by several arrays, each in its pages, or compute much with each element, else find it late.
#[inline(always)]
pub(crate) fn look_ahead<T>(line: &[T]) {
    const AHEAD: usize = 2048;
    const MOST: usize = 4096;
    let from = line.as_ptr().cast::<u8>().wrapping_add(AHEAD);
    for first in (0..size_of_val(line).min(MOST)).step_by(64) {
        prefetch(from.wrapping_add(first).cast());
    }
}

/// Calls `f(first_row, rows)` over disjoint runs of `out`'s rows of `width` elements, at least `least` rows each.
pub(crate) fn for_rows<T: Send>(
    device: &Device,
    out: &mut [T],
    width: usize,
    least: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    for_rows2(
        device,
        (out, width),
        (&mut [], 0),
        least,
        #[inline(always)]
        |first, out, _| f(first, out),
    );
}

/// The same with two outputs cut at the same rows.
pub(crate) fn for_rows2<T: Send>(
    device: &Device,
    (out, width): (&mut [T], usize),
    (other, other_width): (&mut [f32], usize),
    least: usize,
    f: impl Fn(usize, &mut [T], &mut [f32]) + Sync,
) {
    let rows = out.len().checked_div(width).unwrap_or(0);
    let parts = device.runs().min(rows / least.max(1)).max(1);
    if parts == 1 {
        return simd(
            #[inline(always)]
            || f(0, out, other),
        );
    }
    let (mut out, mut other) = (out, other);
    let runs = (0..parts).map(|part| {
        let (first, next) = (rows * part / parts, rows * (part + 1) / parts);
        let (run, rest) = std::mem::take(&mut out).split_at_mut((next - first) * width);
        let (other_run, other_rest) = std::mem::take(&mut other).split_at_mut((next - first) * other_width);
        (out, other) = (rest, other_rest);
        (first, run, other_run)
    });
    device.share(runs, |(first, run, other_run)| {
        simd(
            #[inline(always)]
            || f(first, run, other_run),
        );
    });
}

/// Sums `f(row_range) -> partial` of `width` elements over ranges of rows, in range order.
pub(crate) fn sum_over_rows(
    device: &Device,
    rows: usize,
    width: usize,
    f: impl Fn(Range<usize>, &mut [f32]) + Sync,
) -> Vec<f32> {
    sum_beside_rows::<f32>(
        device,
        (&mut [], 0),
        rows,
        width,
        #[inline(always)]
        |range, _, partial| f(range, partial),
    )
}

/// The same, while the ranges' rows of an output are written.
pub(crate) fn sum_beside_rows<T: Send>(
    device: &Device,
    (out, out_width): (&mut [T], usize),
    rows: usize,
    width: usize,
    f: impl Fn(Range<usize>, &mut [T], &mut [f32]) + Sync,
) -> Vec<f32> {
    let parts = device.threads().min(rows / 64).max(1);
    let mut partials = vec![0.0; parts * width];
    if parts == 1 && width > 0 {
        simd(
            #[inline(always)]
            || f(0..rows, out, &mut partials),
        );
        return partials;
    }
    let mut out = out;
    let runs = partials.chunks_mut(width.max(1)).enumerate().map(|(part, partial)| {
        let range = rows * part / parts..rows * (part + 1) / parts;
        let (run, rest) = std::mem::take(&mut out).split_at_mut(range.len() * out_width);
        out = rest;
        (range, run, partial)
    });
    device.share(runs, |(range, run, partial)| {
        simd(
            #[inline(always)]
            || f(range, run, partial),
        );
    });
    let (total, others) = partials.split_at_mut(width);
    for partial in others.chunks(width.max(1)) {
        for (t, p) in total.iter_mut().zip(partial) {
            *t += p;
        }
    }
    partials.truncate(width);
    partials
}

/// A dot product in sixteen independent sums, which a loop in one sum would not allow to be vectors.
#[inline(always)]
pub(crate) fn dot<X: StoredNumber, Y: StoredNumber>(x: &[X], y: &[Y]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (xs, ys) = (x.chunks_exact(16), y.chunks_exact(16));
    let mut sum: f32 = xs.remainder().iter().zip(ys.remainder()).map(|(x, y)| x.wide() * y.wide()).sum();
    for (x, y) in xs.zip(ys) {
        for i in 0..16 {
            lanes[i] = x[i].wide().mul_add(y[i].wide(), lanes[i]);
        }
    }
    sum += lanes.iter().sum::<f32>();
    sum
}

/// The sum of x, likewise.
#[inline(always)]
pub(crate) fn sum<T: StoredNumber>(x: &[T]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane += x.wide());
    }
    rest.iter().map(|x| x.wide()).sum::<f32>() + lanes.iter().sum::<f32>()
}

/// The largest of x and `least`, likewise.
#[inline(always)]
pub(crate) fn largest(x: &[f32], least: f32) -> f32 {
    let mut lanes = [least; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane = if *x > *lane { *x } else { *lane });
    }
    lanes.iter().chain(rest).fold(least, |a, &b| a.max(b))
}

/// The sum of `(x - mean)^2`, likewise.
#[inline(always)]
pub(crate) fn squares_about<T: StoredNumber>(x: &[T], mean: f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            let off = x.wide() - mean;
            *lane = off.mul_add(off, *lane);
        }
    }
    rest.iter().map(|x| (x.wide() - mean) * (x.wide() - mean)).sum::<f32>() + lanes.iter().sum::<f32>()
}

/// `to = from`, or `to += from`, of one line.
#[inline(always)]
pub(crate) fn put_line<A: StoredNumber, B: StoredNumber>(to: &mut [A], from: &[B], accumulate: bool) {
    match accumulate {
        true => to.iter_mut().zip(from).for_each(|(to, from)| *to = A::of(to.wide() + from.wide())),
        false => to.iter_mut().zip(from).for_each(|(to, from)| *to = A::of(from.wide())),
    }
}

/// `out = f(x)` element by element; `accumulate` adds instead.
pub(crate) fn map<O: StoredNumber, X: StoredNumber>(
    device: &Device,
    out: &mut [O],
    x: &[X],
    accumulate: bool,
    f: impl Fn(f32) -> f32 + Sync + Copy,
) {
    zip(
        device,
        out,
        x,
        x,
        accumulate,
        #[inline(always)]
        |x, _| f(x),
    );
}

/// `out = f(x, y)` element by element; `accumulate` adds instead.
pub(crate) fn zip<O: StoredNumber, X: StoredNumber, Y: StoredNumber>(
    device: &Device,
    out: &mut [O],
    x: &[X],
    y: &[Y],
    accumulate: bool,
    f: impl Fn(f32, f32) -> f32 + Sync + Copy,
) {
    assert!(out.len() == x.len() && out.len() == y.len(), "{}, {}, {}", out.len(), x.len(), y.len());
    for_rows(
        device,
        out,
        1,
        1 << 13,
        #[inline(always)]
        |first, out| {
            let (x, y) = (&x[first..first + out.len()], &y[first..first + out.len()]);
            if accumulate {
                for ((o, x), y) in out.iter_mut().zip(x).zip(y) {
                    *o = O::of(o.wide() + f(x.wide(), y.wide()));
                }
            } else {
                for ((o, x), y) in out.iter_mut().zip(x).zip(y) {
                    *o = O::of(f(x.wide(), y.wide()));
                }
            }
        },
    );
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// That a CPU's vectors are used is decided by features of a dependency, which no error tells apart from none.
    #[test]
    fn loops_are_compiled_for_the_vectors_of_this_cpu() {
        let lanes = [is_x86_feature_detected!("avx512f"), is_x86_feature_detected!("avx2")];
        let is_scalar = matches!(pulp::Arch::new(), pulp::Arch::Scalar);
        assert_eq!(is_scalar, lanes == [false, false]);
        let product = simd(
            #[inline(always)]
            || 2.0f32.mul_add(3.0, 1.0),
        );
        assert_eq!(product, 7.0);
    }
}
