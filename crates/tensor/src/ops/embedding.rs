//! Looking up rows of a table by id: token embeddings and learned positions.

use crate::cpu::rows::for_rows;
use crate::dtype::Dtype;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// Rows of this table `[V, D]` by `ids`: gives `[ids.len(), D]` stored as `dtype`.
    ///
    /// Panics on an id outside the table: data is checked where it is read.
    #[track_caller]
    pub fn embed(&self, ids: &[u32], dtype: Dtype) -> Var {
        let (vocab, width) = (self.shape()[0], self.value().cols());
        assert!(ids.iter().all(|&id| (id as usize) < vocab), "an id is outside a table of {vocab} rows");
        let table = self.value().to_f32();
        let mut out = Tensor::stale(self.device(), &[ids.len(), width], Dtype::F32);
        for_rows(
            self.device(),
            out.f32s_mut(),
            width,
            256,
            #[inline(always)]
            |first, run| {
                for (line, &id) in run.chunks_exact_mut(width).zip(&ids[first..]) {
                    line.copy_from_slice(&table.f32s()[id as usize * width..][..width]);
                }
            },
        );
        let (to, ids, shape) = (self.input(), ids.to_vec(), self.shape().to_vec());
        self.tape().op("embedding", out.cast(dtype), &[self], move |g, gradients| {
            let device = g.device().clone();
            gradients.write(&device, to, &shape, |table, accumulate| {
                if !accumulate {
                    table.fill(0.0);
                }
                for (line, &id) in g.f32s().chunks_exact(width).zip(&ids) {
                    let row = &mut table[id as usize * width..][..width];
                    row.iter_mut().zip(line).for_each(|(t, x)| *t += x);
                }
            });
        })
    }
}
