//! Matrices as the kernels of products see them: addresses and strides.

/// A read-only matrix as the kernels see it.
#[derive(Clone, Copy)]
pub(super) struct Mat {
    pub(super) data: *const f32,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

// SAFETY: a `Mat` is only made from a `View`, whose borrow outlives the kernels' threads.
unsafe impl Send for Mat {}

/// A matrix to write, rows contiguous.
#[derive(Clone, Copy)]
pub(super) struct MatMut {
    pub(super) data: *mut f32,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
}

// SAFETY: made from an exclusive borrow; threads get disjoint blocks.
unsafe impl Send for MatMut {}

// SAFETY: as above.
unsafe impl Sync for MatMut {}

impl Mat {
    /// # Safety
    /// The block lies inside the matrix.
    pub(super) unsafe fn block(self, i: usize, j: usize, rows: usize, cols: usize) -> Mat {
        // SAFETY: the caller's promise.
        let data = unsafe { self.data.add(i * self.row_stride + j * self.col_stride) };
        Mat { data, rows, cols, ..self }
    }

    pub(super) fn transposed(self) -> Mat {
        let Mat { data, rows, cols, row_stride, col_stride } = self;
        Mat { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}

impl MatMut {
    /// # Safety
    /// The block lies inside the matrix.
    pub(super) unsafe fn block(self, i: usize, j: usize, rows: usize, cols: usize) -> MatMut {
        // SAFETY: the caller's promise.
        let data = unsafe { self.data.add(i * self.row_stride + j) };
        MatMut { data, rows, cols, ..self }
    }
}
