//! ColumnRange: some of a matrix, and those of two matrices side by side.

use super::rows::for_rows;
use crate::device::Device;

/// Rows of a thread at least.
const LEAST: usize = 64;

/// Widths of a matrix and of the columns that are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ColumnRange {
    pub(crate) of: usize,
    pub(crate) first: usize,
    pub(crate) count: usize,
}

impl ColumnRange {
    #[inline(always)]
    fn of_line<'a>(&self, line: &'a [f32]) -> &'a [f32] {
        &line[self.first..][..self.count]
    }
}

#[inline(always)]
fn put(to: &mut [f32], from: &[f32], accumulate: bool) {
    match accumulate {
        true => to.iter_mut().zip(from).for_each(|(to, from)| *to += from),
        false => to.copy_from_slice(from),
    }
}

pub(crate) fn columns(device: &Device, out: &mut [f32], x: &[f32], columns: ColumnRange, accumulate: bool) {
    for_rows(
        device,
        out,
        columns.count,
        LEAST,
        #[inline(always)]
        |first, run| {
            let lines = x[first * columns.of..].chunks_exact(columns.of);
            for (to, line) in run.chunks_exact_mut(columns.count).zip(lines) {
                put(to, columns.of_line(line), accumulate);
            }
        },
    );
}

pub(crate) fn columns_back(device: &Device, d: &mut [f32], g: &[f32], columns: ColumnRange, accumulate: bool) {
    for_rows(
        device,
        d,
        columns.of,
        LEAST,
        #[inline(always)]
        |first, run| {
            let lines = g[first * columns.count..].chunks_exact(columns.count);
            for (to, line) in run.chunks_exact_mut(columns.of).zip(lines) {
                if !accumulate {
                    to.fill(0.0);
                }
                put(&mut to[columns.first..][..columns.count], line, accumulate);
            }
        },
    );
}

/// `widths` are those of x and of `other`.
pub(crate) fn beside(device: &Device, out: &mut [f32], x: &[f32], other: &[f32], widths: [usize; 2], repeats: usize) {
    let [width, other_width] = widths;
    for_rows(
        device,
        out,
        width + other_width,
        LEAST,
        #[inline(always)]
        |first, run| {
            for (row, to) in (first..).zip(run.chunks_exact_mut(width + other_width)) {
                to[..width].copy_from_slice(&x[row * width..][..width]);
                to[width..].copy_from_slice(&other[row / repeats * other_width..][..other_width]);
            }
        },
    );
}

/// Of `other`.
pub(crate) fn beside_back(
    device: &Device,
    d: &mut [f32],
    g: &[f32],
    columns: ColumnRange,
    repeats: usize,
    accumulate: bool,
) {
    for_rows(
        device,
        d,
        columns.count,
        LEAST,
        #[inline(always)]
        |first, run| {
            let lines = g[first * repeats * columns.of..].chunks_exact(repeats * columns.of);
            for (to, lines) in run.chunks_exact_mut(columns.count).zip(lines) {
                if !accumulate {
                    to.fill(0.0);
                }
                lines.chunks_exact(columns.of).for_each(|line| put(to, columns.of_line(line), true));
            }
        },
    );
}
