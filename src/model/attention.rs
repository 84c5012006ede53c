//! The attention sub-layer of any family: which of two kinds it is.

use std::sync::Arc;

use guildhall_tensor::{Device, Var};

use super::Sizes;
use super::cache::Cache;
use super::heads::HeadsAttention;
use super::relative_attention::RelativeAttention;
use super::spans::Spans;
use crate::moe::Error;
use crate::parallel::{Mesh, Parameters, Stream, Weight};

/// Projections of one layer, and how its tokens see each other.
#[derive(Debug)]
pub(super) enum Attention {
    Heads(Box<HeadsAttention>),
    Relative(Box<RelativeAttention>),
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
