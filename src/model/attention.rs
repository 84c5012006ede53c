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

/// What self-attention needs to know of the tokens among which it takes place.
#[derive(Clone, Copy)]
pub(super) struct Surroundings<'a> {
    pub(super) spans: &'a Spans,
    /// `[distances, heads]`, added to scores.
    pub(super) bias: Option<&'a Var>,
}

/// Projections of one layer, and how its tokens see each other.
#[derive(Debug)]
pub(super) enum Attention {
    Heads(Box<HeadsAttention>),
    Relative(Box<RelativeAttention>),
}

impl Attention {
    /// Of layer `layer` of the model.
    pub(super) fn new(device: &Arc<Device>, name: &str, layer: usize, sizes: &Sizes, mesh: &Mesh) -> Attention {
        match sizes.blueprint().is_segmented() {
            true => Attention::Relative(Box::new(RelativeAttention::new(device, name, sizes, mesh))),
            false => Attention::Heads(Box::new(HeadsAttention::new(device, name, layer, sizes, mesh))),
        }
    }

    /// x `[T, D]` gives `[T, D]`, both in the stream. Collective over the tensor group.
    ///
    /// # Errors
    /// What the group reports.
    ///
    /// # Panics
    /// On another family's spans.
    pub(super) fn forward(&self, x: &Var, among: Surroundings, stream: &Stream) -> Result<Var, Error> {
        match (self, among.spans) {
            (Attention::Heads(attention), Spans::Heads(spans)) => attention.forward(x, spans, among.bias, stream),
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
        among: Surroundings,
        stream: &Stream,
        cache: &mut Cache,
    ) -> Result<Var, Error> {
        match (self, among.spans) {
            (Attention::Heads(attention), Spans::Heads(spans)) => {
                attention.forward_cached(x, (&spans.all, among.bias), stream, cache)
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
            Attention::Heads(attention) => attention.visit(f),
            Attention::Relative(attention) => attention.visit(f),
        }
    }
}
