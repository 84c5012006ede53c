//! ColumnRange: some of a matrix, and those of two matrices side by side.

use super::rows::{for_rows, put_line};
use super::stored::{Stored, StoredNumber, StoredRef, as_numbers};
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
    fn of_line<'a, T>(&self, line: &'a [T]) -> &'a [T] {
        &line[self.first..][..self.count]
    }
}

pub(crate) fn columns(device: &Device, out: Stored, x: StoredRef, columns: ColumnRange, accumulate: bool) {
    as_numbers!(Stored(out), StoredRef(x) => put_columns(device, out, x, columns, accumulate));
}

fn put_columns<O: StoredNumber, X: StoredNumber>(
    device: &Device,
    out: &mut [O],
    x: &[X],
    columns: ColumnRange,
    accumulate: bool,
) {
    for_rows(
        device,
        out,
        columns.count,
        LEAST,
        #[inline(always)]
        |first, run| {
            let lines = x[first * columns.of..].chunks_exact(columns.of);
            for (to, line) in run.chunks_exact_mut(columns.count).zip(lines) {
                put_line(to, columns.of_line(line), accumulate);
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
                put_line(&mut to[columns.first..][..columns.count], line, accumulate);
            }
        },
    );
}

/// `widths` are those of x and of `other`.
pub(crate) fn beside(device: &Device, out: Stored, x: StoredRef, other: StoredRef, widths: [usize; 2], repeats: usize) {
    as_numbers!(Stored(out), StoredRef(x), StoredRef(other) => put_beside(device, out, x, other, widths, repeats));
}

fn put_beside<O: StoredNumber, X: StoredNumber, Y: StoredNumber>(
    device: &Device,
    out: &mut [O],
    x: &[X],
    other: &[Y],
    [width, other_width]: [usize; 2],
    repeats: usize,
) {
    for_rows(
        device,
        out,
        width + other_width,
        LEAST,
        #[inline(always)]
        |first, run| {
            for (row, to) in (first..).zip(run.chunks_exact_mut(width + other_width)) {
                put_line(&mut to[..width], &x[row * width..][..width], false);
                put_line(&mut to[width..], &other[row / repeats * other_width..][..other_width], false);
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
                lines.chunks_exact(columns.of).for_each(|line| put_line(to, columns.of_line(line), true));
            }
        },
    );
}
