//! The attention sub-layer of any family: who sees whom, what stays behind for tokens to come, and which of two kinds it
//! is.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::ops::{self, KvCache, Stretches, causal_keys, cross_keys, rotary_tables, segment_keys};
use guildhall_tensor::{Device, Index, Tensor, Var};

use super::heads::HeadsAttention;
use super::relative_attention::RelativeAttention;
use super::{Positions, Sizes};
use crate::moe::Error;
use crate::parallel::{Mesh, Parameters, Rows, Stream, Weight};

/// Projections of one layer, and how its tokens see each other.
#[derive(Debug)]
pub(super) enum Attention {
    Heads(Box<HeadsAttention>),
    Relative(Box<RelativeAttention>),
}

/// What every layer's attention needs to know of a batch, computed once.
pub(super) enum Spans {
    Heads(Rc<ops::AttentionSpans>),
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
    pub(super) fn new(device: &Arc<Device>, rows: &Rows, is_causal: bool, sizes: &Sizes) -> Spans {
        let (segments, seq) = (&rows.segments, rows.seq);
        if sizes.blueprint().is_segmented() {
            let (segment, memory) = sizes.segment_and_memory();
            return Spans::Relative(Arc::new(match rows.counted {
                Some(_) => Stretches::counted(device, (seq, rows.len()), segment, memory),
                None => Stretches::new(device, segments, seq, segment, memory),
            }));
        }
        let rotary = rotary(device, rows.index(&rows.positions), sizes);
        if rows.counted.is_some() {
            // A document a row.
            let seen = if is_causal { (seq as f64 + 1.0) / 2.0 } else { seq as f64 };
            return Spans::Heads(Rc::new(ops::AttentionSpans::counted(device, (seq, rows.len()), seen, rotary)));
        }
        let keys = if is_causal { causal_keys } else { segment_keys };
        Spans::Heads(Rc::new(ops::AttentionSpans::new(device, seq, &keys(segments, seq), rotary)))
    }

    /// Of tokens that read another text, row by row.
    pub(super) fn across(device: &Arc<Device>, rows: &Rows, source: &Rows) -> ops::AttentionSpans {
        if rows.counted.is_some() {
            return ops::AttentionSpans::counted(device, (rows.seq, rows.len()), source.seq as f64, None)
                .across(source.seq);
        }
        let keys = cross_keys((&rows.segments, rows.seq), (&source.segments, source.seq));
        ops::AttentionSpans::new(device, rows.seq, &keys, None).across(source.seq)
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
        Spans::Heads(Rc::new(ops::AttentionSpans::new(device, positions.len(), &[], rotary)))
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
            false => Attention::Heads(Box::new(HeadsAttention::new(device, name, sizes, mesh))),
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
            (Attention::Heads(attention), Spans::Heads(spans)) => attention.forward(x, spans, stream),
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
            (Attention::Heads(attention), Spans::Heads(spans)) => attention.forward_cached(x, spans, stream, cache),
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
            Attention::Heads(attention) => attention.visit(f),
            Attention::Relative(attention) => attention.visit(f),
        }
    }
}
