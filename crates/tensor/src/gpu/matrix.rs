//! Matrices in an accelerator's memory, and what an engine does with them.

use super::call::DeviceElements;

/// Some rows of elements that lie one after the other, possibly read as their transpose.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceMatrix {
    pub(crate) elements: DeviceElements,
    /// How many of them are before the first row.
    pub(crate) first: usize,
    /// As they are stored.
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) transposed: bool,
}

impl DeviceMatrix {
    /// Some of its rows.
    #[track_caller]
    pub(super) fn at_rows(self, start: usize, rows: usize) -> DeviceMatrix {
        assert!(start + rows <= self.rows, "rows {start} + {rows} of {}", self.rows);
        DeviceMatrix { first: self.first + start * self.cols, rows, ..self }
    }

    /// Rows and columns as they are read.
    pub(super) fn dims(&self) -> [usize; 2] {
        if self.transposed { [self.cols, self.rows] } else { [self.rows, self.cols] }
    }

    /// The address of the first element.
    pub(super) fn address(&self) -> u64 {
        self.elements.address() + (self.first * self.elements.dtype().bytes()) as u64
    }
}

/// `c (+)= a b`. Factors are of one type, sums are f32; c is f32 or of the factors' type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceProduct {
    pub(crate) c: DeviceMatrix,
    pub(crate) a: DeviceMatrix,
    pub(crate) b: DeviceMatrix,
    pub(crate) accumulate: bool,
}

impl DeviceProduct {
    /// # Panics
    /// If two of them write to the same elements.
    #[track_caller]
    pub(super) fn assert_apart(products: &[DeviceProduct]) {
        let written = |product: &DeviceProduct| {
            let (of, first) = (&product.c, product.c.address());
            first..first + (of.rows * of.cols * of.elements.dtype().bytes()) as u64
        };
        let mut written: Vec<_> = products.iter().map(written).filter(|range| !range.is_empty()).collect();
        written.sort_by_key(|range| range.start);
        assert!(written.is_sorted_by(|one, next| one.end <= next.start), "products that write to the same elements");
    }

    /// Rows, inner length and columns.
    ///
    /// # Panics
    /// If shapes or types do not fit, or a matrix ends after its memory.
    #[track_caller]
    pub(super) fn dims(&self) -> [usize; 3] {
        let ([rows, inner], [of_b, cols]) = (self.a.dims(), self.b.dims());
        assert!(inner == of_b && self.c.dims() == [rows, cols], "{self:?}");
        let [c, a, b] = [self.c, self.a, self.b].map(|of| of.elements.dtype());
        assert!(a == b && (c == a || c == crate::dtype::Dtype::F32), "{self:?}");
        let fits = |of: &DeviceMatrix| of.first + of.rows * of.cols <= of.elements.len();
        assert!([&self.c, &self.a, &self.b].into_iter().all(fits), "{self:?}");
        [rows, inner, cols]
    }
}
