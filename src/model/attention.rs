//! The attention sub-layer: one fused projection, attention, one projection back.

use std::sync::Arc;

use guildhall_tensor::ops::{AttentionShape, KvCache, attend_cached, first_keys, rotary_tables};
use guildhall_tensor::{Device, Var};

use super::linear::{Linear, Outputs};
use super::{Family, Sizes};
use crate::data::Batch;
use crate::parallel::{Parameters, Weight};

/// Projections of one layer.
#[derive(Debug)]
pub(super) struct Attention {
    shape: AttentionShape,
    qkv: Linear,
    out: Linear,
}

/// What every layer's attention needs to know of a batch, computed once.
pub(super) struct Spans {
    seq: usize,
    first_key: Vec<u32>,
    rotary: Option<(Vec<f32>, Vec<f32>)>,
}

impl Spans {
    pub(super) fn new(batch: &Batch, sizes: &Sizes) -> Spans {
        Spans {
            seq: batch.seq,
            first_key: first_keys(&batch.segments, batch.seq),
            rotary: rotary(&batch.positions, sizes),
        }
    }
}

/// Rotary tables for these positions, if the family turns queries and keys.
pub(super) fn rotary(positions: &[u32], sizes: &Sizes) -> Option<(Vec<f32>, Vec<f32>)> {
    let model = &sizes.model;
    (model.family == Family::Mixtral).then(|| rotary_tables(positions, model.d_model / model.heads, model.rope_theta))
}

impl Attention {
    pub(super) fn new(device: &Arc<Device>, name: &str, sizes: &Sizes) -> Attention {
        let (d, heads, kv_heads) = (sizes.model.d_model, sizes.model.heads, sizes.kv_heads());
        let shape = AttentionShape { heads, kv_heads, head_dim: d / heads };
        let part = |part: &str, heads: usize| (format!("{name}.{part}"), heads * shape.head_dim);
        let qkv = [part("q_proj", heads), part("k_proj", kv_heads), part("v_proj", kv_heads)];
        let out = [(format!("{name}.o_proj"), d)];
        let biases = sizes.has_biases();
        Attention {
            shape,
            qkv: Linear::new(device, Outputs(&qkv), d, sizes.dtype, (sizes.init(), biases)),
            out: Linear::new(device, Outputs(&out), d, sizes.dtype, (sizes.residual_init(), biases)),
        }
    }

    /// x `[T, D]` gives `[T, D]`.
    pub(super) fn forward(&self, x: &Var, spans: &Spans) -> Var {
        let qkv = self.qkv.forward(x);
        self.out.forward(&qkv.attention(self.shape, spans.seq, &spans.first_key, spans.rotary.as_ref()))
    }

    /// The same for tokens that follow those in `cache`.
    pub(super) fn forward_cached(&self, x: &Var, rotary: Option<&(Vec<f32>, Vec<f32>)>, cache: &mut KvCache) -> Var {
        let qkv = self.qkv.forward(x);
        let attended = attend_cached(qkv.value(), self.shape, rotary, cache);
        self.out.forward(&x.tape().constant(attended))
    }
}

impl Parameters for Attention {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.qkv.visit(f);
        self.out.visit(f);
    }
}
