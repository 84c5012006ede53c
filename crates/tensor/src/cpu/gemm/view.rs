//! Matrices to multiply: strided views of numbers of either type.

use std::ops::Range;

use half::bf16;

use crate::cpu::mat::{Factor, Mat};
use crate::cpu::stored::StoredRef;

/// The numbers of a matrix, as they are stored.
#[derive(Clone, Copy)]
pub(crate) enum Numbers<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl<'a> From<StoredRef<'a>> for Numbers<'a> {
    #[track_caller]
    fn from(stored: StoredRef<'a>) -> Numbers<'a> {
        match stored {
            StoredRef::F32(numbers) => Numbers::F32(numbers),
            StoredRef::Bf16(numbers) => Numbers::Bf16(numbers),
            StoredRef::U32(_) => panic!("indices are not multiplied"),
        }
    }
}

impl<'a> Numbers<'a> {
    pub(crate) fn len(self) -> usize {
        match self {
            Numbers::F32(numbers) => numbers.len(),
            Numbers::Bf16(numbers) => numbers.len(),
        }
    }

    /// Those from `first` on.
    #[track_caller]
    pub(crate) fn tail(self, first: usize) -> Numbers<'a> {
        match self {
            Numbers::F32(numbers) => Numbers::F32(&numbers[first..]),
            Numbers::Bf16(numbers) => Numbers::Bf16(&numbers[first..]),
        }
    }
}

/// A read-only matrix: element (i, j) at `data[i * row_stride + j * col_stride]`; one stride is 1.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    data: Numbers<'a>,
    pub(super) rows: usize,
    pub(super) cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> View<'a> {
    /// Rows of `cols` elements, `stride` apart.
    #[track_caller]
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> View<'a> {
        View::of(Numbers::F32(data), rows, cols, stride)
    }

    /// The same of numbers of either type.
    #[track_caller]
    pub(crate) fn of(data: Numbers<'a>, rows: usize, cols: usize, stride: usize) -> View<'a> {
        assert!(cols <= stride || rows <= 1, "rows of {cols} overlap at stride {stride}");
        assert!(covers(data.len(), rows, cols, stride), "{} elements, {rows} x {cols} at {stride}", data.len());
        View { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// The transposed matrix over the same memory.
    pub(crate) fn t(self) -> View<'a> {
        let View { rows, cols, row_stride, col_stride, .. } = self;
        View { rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride, ..self }
    }

    /// Some of its rows.
    #[track_caller]
    pub(crate) fn at_rows(self, rows: Range<usize>) -> View<'a> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        // A matrix without columns has no elements to begin at.
        let first = (rows.start * self.row_stride).min(self.data.len());
        View { data: self.data.tail(first), rows: rows.len(), ..self }
    }

    pub(super) fn is_bf16(&self) -> bool {
        matches!(self.data, Numbers::Bf16(_))
    }

    pub(super) fn factor(self) -> Factor {
        let View { data, rows, cols, row_stride, col_stride, .. } = self;
        match data {
            Numbers::F32(data) => Factor::F32(Mat { data: data.as_ptr(), rows, cols, row_stride, col_stride }),
            Numbers::Bf16(data) => Factor::Bf16(Mat { data: data.as_ptr(), rows, cols, row_stride, col_stride }),
        }
    }
}

pub(super) fn covers(len: usize, rows: usize, cols: usize, stride: usize) -> bool {
    rows == 0 || cols == 0 || (rows - 1) * stride + cols <= len
}
