//! Looking up rows of a table by id: token embeddings and learned positions.

use half::bf16;

use crate::cpu::rows::for_rows;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tape::Var;
use crate::tensor::Tensor;

impl Var {
    /// Rows of this table `[V, D]` by `ids`: gives `[ids.len(), D]` stored as `dtype`.
    ///
    /// Panics on an id outside the table: data is checked where it is read.
    #[track_caller]
    pub fn embed(&self, ids: &[u32], dtype: Dtype) -> Var {
        let vocab = self.shape()[0];
        assert!(ids.iter().all(|&id| (id as usize) < vocab), "an id is outside a table of {vocab} rows");
        self.embed_part(ids, 0, dtype)
    }

    /// The same by a part of the table, whose rows `[V', D]` have the ids from `first` on; other ids give zeros.
    #[track_caller]
    pub fn embed_part(&self, ids: &[u32], first: usize, dtype: Dtype) -> Var {
        let (here, width) = (self.shape()[0], self.value().cols());
        // An id before the first wraps around to one far beyond the last.
        let place = move |id: u32| Some((id as usize).wrapping_sub(first)).filter(|&row| row < here);
        let (device, table) = (self.device(), self.value());
        let mut out = Tensor::stale(device, &[ids.len(), width], table.dtype());
        match table.dtype() {
            Dtype::F32 => look_up(device, (table.f32s(), width), ids, (out.f32s_mut(), 0.0), place),
            Dtype::Bf16 => look_up(device, (table.bf16s(), width), ids, (out.bf16s_mut(), bf16::ZERO), place),
        }
        let (to, ids, shape) = (self.input(), ids.to_vec(), self.shape().to_vec());
        self.tape().op("embedding", out.cast(dtype), &[self], move |g, gradients| {
            let device = g.device().clone();
            gradients.write_rows(&device, to, &shape, |rows, table, accumulate| {
                if !accumulate {
                    table.fill(0.0);
                }
                for (line, &id) in g.f32s().chunks_exact(width).zip(&ids) {
                    if let Some(row) = place(id).filter(|row| rows.contains(row)) {
                        let row = &mut table[(row - rows.start) * width..][..width];
                        row.iter_mut().zip(line).for_each(|(t, x)| *t += x);
                    }
                }
            });
        })
    }
}

/// Rows of a table as they are stored, each id's at its place; `zero` where it has none.
fn look_up<T: Copy + Send + Sync>(
    device: &Device,
    (table, width): (&[T], usize),
    ids: &[u32],
    (out, zero): (&mut [T], T),
    place: impl Fn(u32) -> Option<usize> + Sync,
) {
    for_rows(
        device,
        out,
        width,
        256,
        #[inline(always)]
        |first, run| {
            for (line, &id) in run.chunks_exact_mut(width).zip(&ids[first..]) {
                match place(id) {
                    Some(row) => line.copy_from_slice(&table[row * width..][..width]),
                    None => line.fill(zero),
                }
            }
        },
    );
}
