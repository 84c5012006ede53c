//! Looking up rows of a table by id: token embeddings and learned positions.

use super::linear::scratch_for;
use crate::dtype::Dtype;
use crate::index::Index;
use crate::kernels;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// Rows of this table `[V, D]` by `ids`: gives `[ids.len(), D]` stored as `dtype`.
    ///
    /// Panics on an id outside the table: data is checked where it is read.
    #[track_caller]
    pub fn embed<'a>(&self, ids: impl Into<Index<'a>>, dtype: Dtype) -> Var {
        let (ids, vocab) = (ids.into(), self.shape()[0]);
        assert!(ids.all(|id| (id as usize) < vocab), "an id is outside a table of {vocab} rows");
        self.embed_part(ids, 0, dtype)
    }

    /// The same by a part of the table, whose rows `[V', D]` have the ids from `first` on; other ids give zeros.
    #[track_caller]
    pub fn embed_part<'a>(&self, ids: impl Into<Index<'a>>, first: usize, dtype: Dtype) -> Var {
        let (width, table) = (self.value().cols(), self.value());
        let ids = ids.into().on(self.device());
        let mut out = Tensor::stale(self.device(), &[ids.len(), width], table.dtype());
        kernels::look_up(&mut out, table, &ids, first, width);
        let (to, shape) = (self.input(), self.shape().to_vec());
        self.tape().op("embedding", out.cast(dtype), &[self], move |g, gradients| {
            gradients.write_stored(g.device(), to, &shape, |table, accumulate| {
                let mut scratch = scratch_for(table, width);
                kernels::look_up_back(table, &mut scratch, &g, &ids, first, width, accumulate);
            });
        })
    }
}

impl Tensor {
    /// Rows of this table `[V, D]` by ids, of which the first row has `first`: `[ids.len(), D]`, stored as the table is. Rows
    /// of ids that it does not have are zeros.
    #[track_caller]
    pub fn rows_by_id<'a>(&self, ids: impl Into<Index<'a>>, first: usize) -> Tensor {
        let ids = ids.into().on(self.device());
        let mut rows = Tensor::stale(self.device(), &[ids.len(), self.cols()], self.dtype());
        kernels::look_up(&mut rows, self, &ids, first, self.cols());
        rows
    }

    /// Turns this table `[V, D]` into one of zeros but for the rows of some ids, no two of them equal: what
    /// [`Tensor::rows_by_id`] is without the others.
    #[track_caller]
    pub fn set_rows_by_id<'a>(&mut self, rows: &Tensor, ids: impl Into<Index<'a>>, first: usize) {
        let (ids, width) = (ids.into().on(self.device()), self.cols());
        let mut scratch = scratch_for(self, width);
        kernels::look_up_back(self, &mut scratch, &rows.to_f32(), &ids, first, width, false);
    }
}
