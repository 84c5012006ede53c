//! Attention by heads: projections to queries, keys and values, attention, one projection back. Keys and values may be of
//! another text.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::ops::{self, AttentionShape, CachedTerms, ScoreTerms, attend_cached, side_by_side};
use guildhall_tensor::{Device, Dtype, Part, Tensor, Var};

use super::block::MemoryKeys;
use super::cache::Cache;
use super::linear::{Cut, Linear, LinearShape, product};
use super::projections::{Maker, Projections};
use super::rotary;
use super::spans::{Across, HeadSpans};
use super::{HeadsKind, Sizes};
use crate::moe::Error;
use crate::parallel::{Mesh, Parameters, Placement, Spread, Stream, Weight};

/// This rank's heads.
#[derive(Debug)]
pub(super) struct HeadsAttention {
    shape: AttentionShape,
    projections: Projections,
    out: Linear,
    /// Factor on products of queries and keys, if it is another than the usual one.
    scale: Option<f32>,
    /// A score of each head that no token has.
    sinks: Option<Weight>,
    /// How many tokens one sees, itself among them, if not all.
    window: Option<usize>,
}

/// What self-attention does to its scores, as values on a tape.
struct OnTape {
    out: Vec<Var>,
    bias: Option<Var>,
    sinks: Option<Var>,
}

impl HeadsAttention {
    /// Of tokens to tokens of the same text, in layer `layer`.
    pub(super) fn new(device: &Arc<Device>, name: &str, layer: usize, sizes: &Sizes, mesh: &Mesh) -> HeadsAttention {
        let maker = Maker { device, name, sizes, mesh, heads: sizes.heads() };
        let window = sizes.blueprint().window_of(layer);
        HeadsAttention { window, ..HeadsAttention::with(Projections::of_one_text(&maker), &maker) }
    }

    /// Of tokens to tokens of another text.
    pub(super) fn across(device: &Arc<Device>, name: &str, sizes: &Sizes, mesh: &Mesh) -> HeadsAttention {
        let maker = Maker { device, name, sizes, mesh, heads: sizes.heads() };
        HeadsAttention::with(Projections::of_two_texts(&maker), &maker)
    }

    fn with(projections: Projections, maker: &Maker) -> HeadsAttention {
        let HeadsKind { heads, kv_heads, head_dim, out_bias, sinks, .. } = maker.heads;
        let (sizes, ranks) = (maker.sizes, maker.mesh.tensor.size());
        let outputs = [(format!("{}.o_proj", maker.name), sizes.model.d_model)];
        let out =
            LinearShape { outputs: &outputs, inputs: heads * maker.heads.value_dim(), cut: Cut::Inputs(maker.mesh) };
        let sink_of_each = || {
            let slice = maker.mesh.slice(0, heads);
            let placement =
                Placement::sliced(Spread::Tensor, [(format!("{}.sinks", maker.name), vec![heads], Some(slice))]);
            Weight::new(maker.device, placement, &[slice.len], sizes.dtype, sizes.init())
        };
        HeadsAttention {
            shape: AttentionShape { heads: heads / ranks, kv_heads: (kv_heads / ranks).max(1), head_dim },
            projections,
            out: Linear::new(maker.device, out, sizes, (sizes.residual_init(), out_bias)),
            scale: rotary::score_scale(sizes),
            sinks: sinks.then(sink_of_each),
            window: None,
        }
    }

    /// x `[T, D]` gives `[T, D]`, both in the stream; `bias` `[distances, heads]` is added to scores.
    ///
    /// # Errors
    /// What the tensor group reports; so for all that follow.
    pub(super) fn forward(
        &self,
        x: &Var,
        spans: &HeadSpans,
        bias: Option<&Var>,
        stream: &Stream,
    ) -> Result<Var, Error> {
        let projected = self.projections.of(&stream.to_parts(x)?, None, stream)?;
        let spans =
            if self.window.is_some() { spans.windowed.as_ref().expect("spans of a window") } else { &spans.all };
        let own = self.on_tape(x, bias, stream);
        Ok(stream.from_parts(self.attend(projected, own, spans))?)
    }

    /// The same for tokens that attend to those of another text, `memory`.
    pub(super) fn forward_across(&self, x: &Var, stream: &Stream, memory: &Var, across: &Across) -> Result<Var, Error> {
        let (of, to) = (stream.to_parts(x)?, across.stream.to_parts(memory)?);
        let projected = self.projections.of(&of, Some(&to), stream)?;
        let own = self.on_tape(x, None, stream);
        Ok(stream.from_parts(self.attend(projected, own, &across.spans))?)
    }

    fn on_tape(&self, x: &Var, bias: Option<&Var>, stream: &Stream) -> OnTape {
        OnTape { out: self.out.parts(x, stream), bias: bias.cloned(), sinks: self.sinks_on(x) }
    }

    fn sinks_on(&self, x: &Var) -> Option<Var> {
        self.sinks.as_ref().map(|sinks| x.tape().parameter(&sinks.parameter).cast(Dtype::F32))
    }

    /// The sum over values, and the product that leads back.
    fn attend(&self, projected: Vec<Var>, own: OnTape, spans: &Rc<ops::AttentionSpans>) -> Var {
        let (shape, spans, scale) = (self.shape, spans.clone(), self.scale);
        let counts = [projected.len() - 1, own.out.len(), usize::from(own.bias.is_some())];
        let rest = projected[1..].iter().cloned().chain(own.out).chain(own.bias).chain(own.sinks);
        let rest: Vec<Var> = rest.collect();
        projected[0].tape().segment(Part::Attention, &projected[0], &rest, move |first, rest| {
            let (others, rest) = rest.split_at(counts[0]);
            let (out, rest) = rest.split_at(counts[1]);
            let (bias, sinks) = rest.split_at(counts[2]);
            let attended = match others {
                [] => first.attention(shape, &spans),
                [keys, values] => {
                    let terms = ScoreTerms { scale, bias: bias.first().cloned(), sinks: sinks.first().cloned() };
                    first.attention_with([keys, values], shape, &spans, &terms)
                }
                _ => panic!("queries and {} projections", others.len()),
            };
            product(&attended, out)
        })
    }

    /// Keys and values of another text's tokens, `memory`.
    pub(super) fn keys_values(&self, memory: &Var, stream: &Stream) -> Result<[Tensor; 2], Error> {
        Ok(self.projections.keys_values(&stream.to_parts(memory)?, stream)?.map(|of| of.value().clone()))
    }

    /// [`HeadsAttention::forward_across`] to a text whose keys and values are known, without gradients.
    pub(super) fn forward_across_cached(&self, x: &Var, stream: &Stream, memory: MemoryKeys) -> Result<Var, Error> {
        let queries = self.projections.queries(&stream.to_parts(x)?, stream)?;
        let known = memory.keys_values.iter().map(|of| x.tape().constant(of.clone()));
        let projected = [queries].into_iter().chain(known).collect();
        let own = self.on_tape(x, None, stream);
        Ok(stream.from_parts(self.attend(projected, own, memory.spans))?)
    }

    /// [`HeadsAttention::forward`] for tokens that follow those in `cache`, of which `bias` knows the distances.
    pub(super) fn forward_cached(
        &self,
        x: &Var,
        (spans, bias): (&ops::AttentionSpans, Option<&Var>),
        stream: &Stream,
        cache: &mut Cache,
    ) -> Result<Var, Error> {
        let projected = self.projections.of(&stream.to_parts(x)?, None, stream)?;
        let qkv = match &projected[..] {
            [qkv] => qkv.value().clone(),
            parts => side_by_side(&parts.iter().map(Var::value).collect::<Vec<_>>()),
        };
        let scores = ScoreTerms { scale: self.scale, bias: bias.cloned(), sinks: self.sinks_on(x) };
        let terms = CachedTerms { scores, window: self.window };
        let attended = attend_cached(&qkv, self.shape, spans, &terms, &mut cache.keys_values);
        Ok(self.out.forward_parts(&x.tape().constant(attended), stream)?)
    }
}

impl Parameters for HeadsAttention {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.projections.visit(f);
        self.out.visit(f);
        self.sinks.iter_mut().for_each(f);
    }
}
