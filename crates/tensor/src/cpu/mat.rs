//! Matrices as the kernels of products see them: addresses and strides.

use half::bf16;

/// A read-only matrix as the kernels see it.
#[derive(Clone, Copy)]
pub(super) struct Mat<T = f32> {
    pub(super) data: *const T,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

// SAFETY: a `Mat` is of a borrow that outlives all parts of the product. Nobody writes to it meanwhile or, where it is C to be read,
// only the thread that has the block.
unsafe impl<T: Sync> Send for Mat<T> {}

// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mat<T> {}

/// A matrix to write, rows contiguous.
#[derive(Clone, Copy)]
pub(super) struct MatMut<T = f32> {
    pub(super) data: *mut T,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
}

// SAFETY: made from an exclusive borrow; threads get disjoint blocks.
unsafe impl<T: Send> Send for MatMut<T> {}

// SAFETY: as above.
unsafe impl<T: Send> Sync for MatMut<T> {}

/// A factor of a product in bf16. Numbers of f32 are rounded to it on their way.
#[derive(Clone, Copy)]
pub(super) enum Factor {
    F32(Mat),
    Bf16(Mat<bf16>),
}

impl Factor {
    /// # Safety
    /// The block lies inside the matrix.
    pub(super) unsafe fn block(self, i: usize, j: usize, rows: usize, cols: usize) -> Factor {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Factor::F32(mat) => Factor::F32(mat.block(i, j, rows, cols)),
                Factor::Bf16(mat) => Factor::Bf16(mat.block(i, j, rows, cols)),
            }
        }
    }

    pub(super) fn transposed(self) -> Factor {
        match self {
            Factor::F32(mat) => Factor::F32(mat.transposed()),
            Factor::Bf16(mat) => Factor::Bf16(mat.transposed()),
        }
    }

    pub(super) fn col_stride(self) -> usize {
        match self {
            Factor::F32(mat) => mat.col_stride,
            Factor::Bf16(mat) => mat.col_stride,
        }
    }

    pub(super) fn cols(self) -> usize {
        match self {
            Factor::F32(mat) => mat.cols,
            Factor::Bf16(mat) => mat.cols,
        }
    }
}

impl<T> Mat<T> {
    /// # Safety
    /// The block lies inside the matrix.
    pub(super) unsafe fn block(self, i: usize, j: usize, rows: usize, cols: usize) -> Mat<T> {
        // SAFETY: the caller's promise.
        let data = unsafe { self.data.add(i * self.row_stride + j * self.col_stride) };
        Mat { data, rows, cols, ..self }
    }

    pub(super) fn transposed(self) -> Mat<T> {
        let Mat { data, rows, cols, row_stride, col_stride } = self;
        Mat { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}

impl<T> MatMut<T> {
    /// # Safety
    /// The block lies inside the matrix.
    pub(super) unsafe fn block(self, i: usize, j: usize, rows: usize, cols: usize) -> MatMut<T> {
        // SAFETY: the caller's promise.
        let data = unsafe { self.data.add(i * self.row_stride + j) };
        MatMut { data, rows, cols, ..self }
    }

    /// What is in it, for whoever adds to it.
    pub(super) fn read(self) -> Mat<T> {
        let MatMut { data, rows, cols, row_stride } = self;
        Mat { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// Fills it with `from`, whose rows may lie anywhere, even all in one place; if it is that already, with nothing.
    ///
    /// # Safety
    /// Both matrices cover their memory, `from` is a start of this one (`gemm::Onto`).
    pub(super) unsafe fn fill_from(self, from: Mat<T>)
    where
        T: Copy,
    {
        if std::ptr::eq(self.data, from.data) {
            return;
        }
        for r in 0..self.rows {
            let (to, from) = (self.data.wrapping_add(r * self.row_stride), from.data.wrapping_add(r * from.row_stride));
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(from, to, self.cols) };
        }
    }
}
