//! Attention by heads: projections to queries, keys and values, attention, one projection back. Keys and values may be of
//! another text.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::ops::{self, AttentionShape, attend_cached, side_by_side};
use guildhall_tensor::{Device, Part, Tensor, Var};

use super::block::MemoryKeys;
use super::cache::Cache;
use super::linear::{Cut, Linear, LinearShape, product};
use super::projections::{Maker, Projections};
use super::spans::Across;
use super::{HeadsKind, Sizes};
use crate::moe::Error;
use crate::parallel::{Mesh, Parameters, Stream, Weight};

/// This rank's heads.
#[derive(Debug)]
pub(super) struct HeadsAttention {
    shape: AttentionShape,
    projections: Projections,
    out: Linear,
}

impl HeadsAttention {
    /// Of tokens to tokens of the same text.
    pub(super) fn new(device: &Arc<Device>, name: &str, sizes: &Sizes, mesh: &Mesh) -> HeadsAttention {
        let maker = Maker { device, name, sizes, mesh, heads: sizes.heads() };
        HeadsAttention::with(Projections::of_one_text(&maker), &maker)
    }

    /// Of tokens to tokens of another text.
    pub(super) fn across(device: &Arc<Device>, name: &str, sizes: &Sizes, mesh: &Mesh) -> HeadsAttention {
        let maker = Maker { device, name, sizes, mesh, heads: sizes.heads() };
        HeadsAttention::with(Projections::of_two_texts(&maker), &maker)
    }

    fn with(projections: Projections, maker: &Maker) -> HeadsAttention {
        let HeadsKind { heads, kv_heads, head_dim, out_bias, .. } = maker.heads;
        let (sizes, ranks) = (maker.sizes, maker.mesh.tensor.size());
        let outputs = [(format!("{}.o_proj", maker.name), sizes.model.d_model)];
        let out = LinearShape { outputs: &outputs, inputs: heads * head_dim, cut: Cut::Inputs(maker.mesh) };
        HeadsAttention {
            shape: AttentionShape { heads: heads / ranks, kv_heads: (kv_heads / ranks).max(1), head_dim },
            projections,
            out: Linear::new(maker.device, out, sizes.dtype, (sizes.residual_init(), out_bias)),
        }
    }

    /// x `[T, D]` gives `[T, D]`, both in the stream.
    ///
    /// # Errors
    /// What the tensor group reports; so for all that follow.
    pub(super) fn forward(&self, x: &Var, spans: &Rc<ops::AttentionSpans>, stream: &Stream) -> Result<Var, Error> {
        let projected = self.projections.of(&stream.to_parts(x)?, None);
        let out = self.out.parts(x, stream);
        Ok(stream.from_parts(self.attend(projected, out, spans))?)
    }

    /// The same for tokens that attend to those of another text, `memory`.
    pub(super) fn forward_across(&self, x: &Var, stream: &Stream, memory: &Var, across: &Across) -> Result<Var, Error> {
        let (of, to) = (stream.to_parts(x)?, across.stream.to_parts(memory)?);
        let projected = self.projections.of(&of, Some(&to));
        let out = self.out.parts(x, stream);
        Ok(stream.from_parts(self.attend(projected, out, &across.spans))?)
    }

    /// The sum over values, and the product that leads back.
    fn attend(&self, projected: Vec<Var>, out: Vec<Var>, spans: &Rc<ops::AttentionSpans>) -> Var {
        let (shape, spans, count) = (self.shape, spans.clone(), projected.len());
        let rest: Vec<Var> = projected[1..].iter().cloned().chain(out).collect();
        projected[0].tape().segment(Part::Attention, &projected[0], &rest, move |first, rest| {
            let (others, out) = rest.split_at(count - 1);
            let attended = match others {
                [] => first.attention(shape, &spans),
                [keys, values] => first.attention_to([keys, values], shape, &spans),
                _ => panic!("{count} projections"),
            };
            product(&attended, out)
        })
    }

    /// Keys and values of another text's tokens, `memory`.
    pub(super) fn keys_values(&self, memory: &Var, stream: &Stream) -> Result<[Tensor; 2], Error> {
        Ok(self.projections.keys_values(&stream.to_parts(memory)?).map(|of| of.value().clone()))
    }

    /// [`HeadsAttention::forward_across`] to a text whose keys and values are known, without gradients.
    pub(super) fn forward_across_cached(&self, x: &Var, stream: &Stream, memory: MemoryKeys) -> Result<Var, Error> {
        let queries = self.projections.queries(&stream.to_parts(x)?);
        let known = memory.keys_values.iter().map(|of| x.tape().constant(of.clone()));
        let (projected, out) = ([queries].into_iter().chain(known).collect(), self.out.parts(x, stream));
        Ok(stream.from_parts(self.attend(projected, out, memory.spans))?)
    }

    /// The same for tokens that follow those in `cache`.
    pub(super) fn forward_cached(
        &self,
        x: &Var,
        spans: &ops::AttentionSpans,
        stream: &Stream,
        cache: &mut Cache,
    ) -> Result<Var, Error> {
        let projected = self.projections.of(&stream.to_parts(x)?, None);
        let qkv = match &projected[..] {
            [qkv] => qkv.value().clone(),
            parts => side_by_side(&parts.iter().map(Var::value).collect::<Vec<_>>()),
        };
        let attended = attend_cached(&qkv, self.shape, spans, &mut cache.keys_values);
        Ok(self.out.forward_parts(&x.tape().constant(attended), stream)?)
    }
}

impl Parameters for HeadsAttention {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.projections.visit(f);
        self.out.visit(f);
    }
}
