//! Matrix products on tensors that are matrices of their last dim by all others, or on some of their rows.

use std::ops::Range;

use super::gemm::{Numbers, View, gemm, gemm_onto_row, set_or_add};
use super::rows::{look_ahead, sum_beside_rows, sum_over_rows};
use super::stored::{Stored, StoredNumber, StoredRef, as_numbers};
use crate::device::Device;

/// A matrix in memory: some rows of `cols` elements, possibly read as their transpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Matrix {
    pub(crate) rows: Range<usize>,
    pub(crate) cols: usize,
    pub(crate) transposed: bool,
}

impl Matrix {
    pub(crate) fn new(rows: Range<usize>, cols: usize) -> Matrix {
        Matrix { rows, cols, transposed: false }
    }

    pub(crate) fn t(self) -> Matrix {
        Matrix { transposed: !self.transposed, ..self }
    }

    /// Rows and columns as they are read.
    fn dims(&self) -> [usize; 2] {
        if self.transposed { [self.cols, self.rows.len()] } else { [self.rows.len(), self.cols] }
    }

    #[track_caller]
    fn view<'a>(&self, data: Numbers<'a>) -> View<'a> {
        let first = (self.rows.start * self.cols).min(data.len());
        let view = View::of(data.tail(first), self.rows.len(), self.cols, self.cols);
        if self.transposed { view.t() } else { view }
    }
}

/// `out[rows from first] (+)= a b`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Product {
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    pub(crate) first: usize,
    pub(crate) accumulate: bool,
}

impl Product {
    /// Rows, inner length and columns.
    pub(crate) fn dims(&self) -> [usize; 3] {
        let ([rows, inner], [_, cols]) = (self.a.dims(), self.b.dims());
        [rows, inner, cols]
    }
}

pub(crate) fn multiply_into(device: &Device, out: Stored, a: StoredRef, b: StoredRef, p: &Product) {
    let [rows, _, cols] = p.dims();
    let (range, a, b) = (p.first * cols..(p.first + rows) * cols, p.a.view(a.into()), p.b.view(b.into()));
    match out {
        Stored::F32(out) => gemm(device, &mut out[range], cols, a, b, set_or_add(p.accumulate)),
        Stored::Bf16(out) => gemm(device, &mut out[range], cols, a, b, set_or_add(p.accumulate)),
        Stored::U32(_) => unreachable!("products are no indices"),
    }
}

pub(crate) fn linear(
    device: &Device,
    out: Stored,
    a: StoredRef,
    b: StoredRef,
    row: StoredRef,
    [read_a, read_b]: [&Matrix; 2],
) {
    let (a, b) = (read_a.view(a.into()), read_b.view(b.into()));
    let len = read_a.dims()[0] * read_b.dims()[1];
    match (out, row) {
        (Stored::F32(out), StoredRef::F32(row)) => gemm_onto_row(device, &mut out[..len], a, b, row),
        (Stored::Bf16(out), StoredRef::Bf16(row)) => gemm_onto_row(device, &mut out[..len], a, b, row),
        _ => unreachable!("a row is of its matrix's type"),
    }
}

pub(crate) fn weight_gradient(
    device: &Device,
    mut dw: Stored,
    scratch: &mut [f32],
    g: StoredRef,
    x: StoredRef,
    [outer, inner]: [usize; 2],
    accumulate: bool,
) {
    let rows = g.len().checked_div(outer).unwrap_or(0);
    let (g, x) = (View::of(g.into(), rows, outer, outer).t(), View::of(x.into(), rows, inner, inner));
    dw.by_rows(device, (inner, accumulate), scratch, |some, dw| {
        gemm(device, dw, inner, g.at_rows(some), x, set_or_add(accumulate));
    });
}

pub(crate) fn column_sums(device: &Device, sums: &mut [f32], x: &[f32], rows: usize, accumulate: bool) {
    let cols = sums.len();
    let found = sum_over_rows(
        device,
        rows,
        cols,
        #[inline(always)]
        |rows, sum| {
            for row in x[rows.start * cols..rows.end * cols].chunks_exact(cols) {
                look_ahead(row);
                sum.iter_mut().zip(row).for_each(|(s, x)| *s += x);
            }
        },
    );
    match accumulate {
        true => sums.iter_mut().zip(found).for_each(|(sum, x)| *sum += x),
        false => sums.copy_from_slice(&found),
    }
}

/// What is summed is converted while it is in the cache.
pub(crate) fn convert_and_sum(device: &Device, out: Stored, sums: &mut [f32], x: &[f32]) {
    as_numbers!(Stored(out) => put_and_sum(device, out, sums, x));
}

fn put_and_sum<O: StoredNumber>(device: &Device, out: &mut [O], sums: &mut [f32], x: &[f32]) {
    let cols = sums.len();
    let rows = x.len().checked_div(cols).unwrap_or(0);
    assert_eq!([out.len(), x.len()], [rows * cols; 2], "rows of {cols}");
    let found = sum_beside_rows(
        device,
        (out, cols),
        rows,
        cols,
        #[inline(always)]
        |rows, out, sum| {
            let lines = x[rows.start * cols..rows.end * cols].chunks_exact(cols);
            for (line, out) in lines.zip(out.chunks_exact_mut(cols)) {
                look_ahead(line);
                look_ahead(out);
                for ((sum, x), out) in sum.iter_mut().zip(line).zip(out) {
                    *sum += x;
                    *out = O::of(*x);
                }
            }
        },
    );
    sums.copy_from_slice(&found);
}
