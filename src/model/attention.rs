//! The attention sub-layer of any family, and that of the families whose tokens know their own positions: one fused
//! projection, attention, one projection back.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::ops::{
    self, AttentionShape, KvCache, Stretches, attend_cached, causal_keys, rotary_tables, segment_keys,
};
use guildhall_tensor::{Device, Index, Part, Tensor, Var};

use super::linear::{Cut, Linear, LinearShape, product};
use super::relative_attention::RelativeAttention;
use super::{HeadsKind, Positions, Sizes};
use crate::data::Batch;
use crate::moe::Error;
use crate::parallel::{Mesh, Parameters, Stream, Weight};

/// Projections of one layer, and how its tokens see each other.
#[derive(Debug)]
pub(super) enum Attention {
    Absolute(Box<AbsoluteAttention>),
    Relative(Box<RelativeAttention>),
}

/// What every layer's attention needs to know of a batch, computed once.
pub(super) enum Spans {
    Absolute(Rc<ops::Spans>),
    Relative(Arc<Stretches>),
}

/// What the tokens so far left behind in one layer.
#[derive(Clone, Debug, Default)]
pub(super) struct Cache {
    pub(super) keys_values: KvCache,
    /// Relative positions: the projected distances, which no token changes.
    pub(super) distances: Option<Tensor>,
}

impl Spans {
    pub(super) fn new(device: &Arc<Device>, batch: &Batch, sizes: &Sizes) -> Spans {
        let (segments, seq) = (&batch.segments, batch.seq);
        if sizes.blueprint().is_segmented() {
            let (segment, memory) = sizes.segment_and_memory();
            return Spans::Relative(Arc::new(match batch.counted {
                Some(_) => Stretches::counted(device, (seq, batch.len()), segment, memory),
                None => Stretches::new(device, segments, seq, segment, memory),
            }));
        }
        let rotary = rotary(device, batch.index(&batch.positions), sizes);
        if batch.counted.is_some() {
            // A document a row.
            let seen = if sizes.model.is_causal() { (seq as f64 + 1.0) / 2.0 } else { seq as f64 };
            return Spans::Absolute(Rc::new(ops::Spans::counted(device, (seq, batch.len()), seen, rotary)));
        }
        let keys = if sizes.model.is_causal() { causal_keys } else { segment_keys };
        Spans::Absolute(Rc::new(ops::Spans::new(device, seq, &keys(segments, seq), rotary)))
    }

    /// Of the next tokens of one document, at these positions.
    pub(super) fn of_next(device: &Arc<Device>, positions: &[u32], sizes: &Sizes) -> Spans {
        if sizes.blueprint().is_segmented() {
            let (segment, memory) = sizes.segment_and_memory();
            let tokens = positions.last().map_or(0, |&last| last as usize + 1);
            return Spans::Relative(Arc::new(Stretches::new(device, &vec![0; tokens], tokens, segment, memory)));
        }
        // What they see is told by the cache.
        let rotary = rotary(device, positions.into(), sizes);
        Spans::Absolute(Rc::new(ops::Spans::new(device, positions.len(), &[], rotary)))
    }
}

/// Rotary tables for these positions, where queries and keys are rotated.
fn rotary(device: &Arc<Device>, positions: Index, sizes: &Sizes) -> Option<[Tensor; 2]> {
    let Positions::Rotary { theta, .. } = sizes.blueprint().positions else { return None };
    Some(rotary_tables(device, positions, sizes.heads().head_dim, theta))
}

impl Attention {
    pub(super) fn new(device: &Arc<Device>, name: &str, sizes: &Sizes, mesh: &Mesh) -> Attention {
        match sizes.blueprint().is_segmented() {
            true => Attention::Relative(Box::new(RelativeAttention::new(device, name, sizes, mesh))),
            false => Attention::Absolute(Box::new(AbsoluteAttention::new(device, name, sizes, mesh))),
        }
    }

    /// x `[T, D]` gives `[T, D]`, both in the stream. Collective over the tensor group.
    ///
    /// # Errors
    /// What the group reports.
    ///
    /// # Panics
    /// On another family's spans.
    pub(super) fn forward(&self, x: &Var, spans: &Spans, stream: &Stream) -> Result<Var, Error> {
        match (self, spans) {
            (Attention::Absolute(attention), Spans::Absolute(spans)) => attention.forward(x, spans, stream),
            (Attention::Relative(attention), Spans::Relative(stretches)) => attention.forward(x, stretches, stream),
            _ => panic!("spans of another family"),
        }
    }

    /// The same for tokens that follow those in `cache`.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    ///
    /// # Panics
    /// As [`Attention::forward`].
    pub(super) fn forward_cached(
        &self,
        x: &Var,
        spans: &Spans,
        stream: &Stream,
        cache: &mut Cache,
    ) -> Result<Var, Error> {
        match (self, spans) {
            (Attention::Absolute(attention), Spans::Absolute(spans)) => {
                attention.forward_cached(x, spans, stream, cache)
            }
            (Attention::Relative(attention), Spans::Relative(stretches)) => {
                attention.forward_cached(x, stretches, stream, cache)
            }
            _ => panic!("spans of another family"),
        }
    }
}

impl Parameters for Attention {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        match self {
            Attention::Absolute(attention) => attention.visit(f),
            Attention::Relative(attention) => attention.visit(f),
        }
    }
}

/// Queries, keys and values from one product; this rank's heads.
#[derive(Debug)]
pub(super) struct AbsoluteAttention {
    shape: AttentionShape,
    qkv: Projection,
    out: Linear,
}

/// Weights of queries, keys and values.
#[derive(Debug)]
struct Projection {
    /// Of this rank's heads: of all three, or of queries.
    own: Linear,
    /// Where heads of keys and values are fewer than ranks: those of all heads, and which of their outputs are used here.
    shared: Option<(Linear, Vec<u32>)>,
}

impl Projection {
    fn new(device: &Arc<Device>, name: &str, sizes: &Sizes, mesh: &Mesh) -> Projection {
        let HeadsKind { heads, kv_heads, head_dim, biases, .. } = sizes.heads();
        let part = |part: &str, heads: usize| (format!("{name}.{part}"), heads * head_dim);
        let [q, k, v] = [part("q_proj", heads), part("k_proj", kv_heads), part("v_proj", kv_heads)];
        let linear = |outputs: &[(String, usize)], cut| {
            let shape = LinearShape { outputs, inputs: sizes.model.d_model, cut };
            Linear::new(device, shape, sizes.dtype, (sizes.init(), biases))
        };
        let (rank, ranks) = (mesh.tensor.rank(), mesh.tensor.size());
        if kv_heads.is_multiple_of(ranks) {
            return Projection { own: linear(&[q, k, v], Cut::Outputs(mesh)), shared: None };
        }
        let head = rank * kv_heads / ranks;
        let rows = [head, kv_heads + head].map(|head| head * head_dim..(head + 1) * head_dim);
        let rows = rows.into_iter().flatten().map(|row| row as u32).collect();
        let shared = Some((linear(&[k, v], Cut::Shared), rows));
        Projection { own: linear(&[q], Cut::Outputs(mesh)), shared }
    }

    fn forward(&self, x: &Var) -> Var {
        match &self.shared {
            None => self.own.forward(x),
            Some((keys_values, rows)) => self.own.forward_with(x, keys_values, rows),
        }
    }
}

impl Parameters for Projection {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.own.visit(f);
        self.shared.iter_mut().for_each(|(keys_values, _)| keys_values.visit(f));
    }
}

impl AbsoluteAttention {
    fn new(device: &Arc<Device>, name: &str, sizes: &Sizes, mesh: &Mesh) -> AbsoluteAttention {
        let HeadsKind { heads, kv_heads, head_dim, out_bias, .. } = sizes.heads();
        let ranks = mesh.tensor.size();
        let shape = AttentionShape { heads: heads / ranks, kv_heads: (kv_heads / ranks).max(1), head_dim };
        let outputs = [(format!("{name}.o_proj"), sizes.model.d_model)];
        let out = LinearShape { outputs: &outputs, inputs: heads * head_dim, cut: Cut::Inputs(mesh) };
        AbsoluteAttention {
            shape,
            qkv: Projection::new(device, name, sizes, mesh),
            out: Linear::new(device, out, sizes.dtype, (sizes.residual_init(), out_bias)),
        }
    }

    fn forward(&self, x: &Var, spans: &Rc<ops::Spans>, stream: &Stream) -> Result<Var, Error> {
        let (qkv, out) = (self.qkv.forward(&stream.to_parts(x)?), self.out.parts(x, stream));
        let (shape, spans) = (self.shape, spans.clone());
        let parts =
            x.tape().segment(Part::Attention, &qkv, &out, move |qkv, out| product(&qkv.attention(shape, &spans), out));
        Ok(stream.from_parts(parts)?)
    }

    fn forward_cached(&self, x: &Var, spans: &ops::Spans, stream: &Stream, cache: &mut Cache) -> Result<Var, Error> {
        let qkv = self.qkv.forward(&stream.to_parts(x)?);
        let attended = attend_cached(qkv.value(), self.shape, spans, &mut cache.keys_values);
        Ok(self.out.forward_parts(&x.tape().constant(attended), stream)?)
    }
}

impl Parameters for AbsoluteAttention {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.qkv.visit(f);
        self.out.visit(f);
    }
}
