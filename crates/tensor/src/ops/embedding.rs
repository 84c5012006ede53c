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
