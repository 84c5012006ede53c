//! One block: a list of sub-layers, each added to the residual stream, with a norm before or after.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::{Device, Part, Var, ops};

use super::attention::{Attention, Cache, Spans};
use super::context::OwnContext;
use super::feed_forward::FeedForward;
use super::heads::HeadsAttention;
use super::norm::{Norm, Residual};
use super::{Context, Sizes, StackBlueprint, SubLayerKind};
use crate::moe::{BalanceLoss, Error, Facts, Homes, Importance, LayerOutput, MoeLayer};
use crate::parallel::{Buffer, Mesh, Parameters, Stream, Weight};

/// Layer `index` of the model.
#[derive(Debug)]
pub(super) struct Block {
    index: usize,
    sub_layers: Vec<SubLayer>,
    /// Of the first sub-layer, among the places of dropout.
    first_place: u32,
    dropout: f32,
}

#[derive(Debug)]
struct SubLayer {
    around: Residual,
    body: SubLayerBody,
}

#[derive(Debug)]
enum SubLayerBody {
    SelfAttention(Attention),
    CrossAttention(Box<HeadsAttention>),
    FeedForward(FeedForward),
}

/// Where a block stands.
pub(super) struct LayerPlace {
    /// Of the model.
    pub(super) index: usize,
    pub(super) stack: u32,
    /// What the names of its tensors begin with.
    pub(super) name: String,
}

/// A block's facts about a batch.
pub(super) struct BatchFacts {
    pub(super) spans: Spans,
    /// Where the tokens read another text.
    pub(super) across: Option<Across>,
    pub(super) importance: Importance,
    /// Numbers in the vocabulary.
    pub(super) tokens: Vec<u32>,
    pub(super) first_token: u64,
    /// Within the step.
    pub(super) micro_batch: u32,
    pub(super) homes: Homes,
    /// How the tokens lie between sub-layers.
    pub(super) stream: Stream,
}

/// What cross-attention knows of the text that is read.
pub(super) struct Across {
    pub(super) spans: Rc<ops::AttentionSpans>,
    /// How that text's tokens lie.
    pub(super) stream: Stream,
}

/// What a feed-forward is told about tokens.
pub(super) fn facts<'a>(
    importance: &'a Importance,
    ids: &'a [u32],
    (first, micro_batch, homes): (u64, u32, &'a Homes),
    context: &Context<'a>,
) -> Facts<'a> {
    Facts {
        importance,
        ids,
        first,
        micro_batch,
        homes,
        seed: context.seed,
        step: context.step,
        trains: context.trains,
        routings: context.routings,
    }
}

impl SubLayer {
    fn new(device: &Arc<Device>, kind: SubLayerKind, place: &LayerPlace, sizes: &Sizes, mesh: &Mesh) -> SubLayer {
        let (blueprint, name) = (sizes.blueprint(), &place.name);
        let norm = format!("{name}.{}", blueprint.norm_name(kind));
        let around = Residual {
            norm: Norm::new(device, &norm, sizes, mesh.is_sequence_parallel()),
            place: blueprint.norm_place,
        };
        let body = match kind {
            SubLayerKind::SelfAttention => {
                SubLayerBody::SelfAttention(Attention::new(device, &format!("{name}.self_attn"), sizes, mesh))
            }
            SubLayerKind::CrossAttention => {
                let attention = HeadsAttention::across(device, &format!("{name}.encoder_attn"), sizes, mesh);
                SubLayerBody::CrossAttention(Box::new(attention))
            }
            SubLayerKind::FeedForward => SubLayerBody::FeedForward(FeedForward::new(device, place, sizes, mesh)),
        };
        SubLayer { around, body }
    }

    /// What errors, kernels and bytes are noted under.
    fn scope(&self) -> &'static str {
        match self.body {
            SubLayerBody::SelfAttention(_) => "attention",
            SubLayerBody::CrossAttention(_) => "cross attention",
            SubLayerBody::FeedForward(_) => "feed-forward",
        }
    }
}

/// What a block is given in one pass.
struct Pass<'a> {
    facts: &'a BatchFacts,
    context: &'a Context<'a>,
    /// What the stack before made of the text that is read.
    memory: Option<&'a Var>,
}

impl Block {
    /// Layer `index` of the model, which is one of the stack's.
    pub(super) fn new(
        device: &Arc<Device>,
        (stack, index): (&StackBlueprint, usize),
        sizes: &Sizes,
        mesh: &Mesh,
    ) -> Block {
        let name = format!("{}.layers.{}", stack.name, index - stack.layers.start);
        let place = LayerPlace { index, stack: stack.number, name };
        let sub_layer = |&kind: &SubLayerKind| SubLayer::new(device, kind, &place, sizes, mesh);
        Block {
            index,
            sub_layers: stack.sub_layers.iter().map(sub_layer).collect(),
            first_place: stack.place(index),
            dropout: sizes.model.dropout,
        }
    }

    /// x `[T, D]`, the tokens of the stream that are here, and those of the text that they read. A block may run twice: the second time in
    /// backward.
    pub(super) fn forward(
        self: &Rc<Block>,
        x: &Var,
        memory: Option<&Var>,
        facts: &Rc<BatchFacts>,
        context: &Context,
    ) -> Result<(Var, Option<LayerOutput>), Error> {
        let (block, facts, context) = (self.clone(), facts.clone(), OwnContext::new(context));
        let run = move |inputs: &[Var]| -> Result<_, Error> {
            let pass = Pass { facts: &facts, context: &context.context(), memory: inputs.get(1) };
            let (x, moe) = block.run(&inputs[0], &pass)?;
            Ok(match moe {
                None => (vec![x], None),
                Some(LayerOutput { losses: BalanceLoss { balance, z }, counts, shadowed, .. }) => {
                    (vec![x, balance, z], Some((counts, shadowed)))
                }
            })
        };
        let inputs: Vec<&Var> = [x].into_iter().chain(memory).collect();
        let (outputs, counted) = x.tape().checkpoint(Part::Block, &inputs, run)?;
        let moe = counted.map(|(counts, shadowed)| {
            let losses = BalanceLoss { balance: outputs[1].clone(), z: outputs[2].clone() };
            LayerOutput { y: outputs[0].clone(), losses, counts, shadowed }
        });
        Ok((outputs[0].clone(), moe))
    }

    fn run(&self, x: &Var, pass: &Pass) -> Result<(Var, Option<LayerOutput>), Error> {
        let (mut x, mut moe) = (x.clone(), None);
        for (place, sub_layer) in (self.first_place..).zip(&self.sub_layers) {
            x.tape().set_scope(format!("layer {} {}", self.index, sub_layer.scope()));
            x = sub_layer.around.around(&x, |x| {
                let (y, said) = sub_layer.body.forward(x, pass)?;
                moe = moe.take().or(said);
                Ok(self.drop(y, place, pass))
            })?;
        }
        Ok((x, moe))
    }

    /// The same for tokens that follow those in `cache`, without gradients.
    pub(super) fn forward_cached(
        &self,
        x: &Var,
        (spans, stream): (&Spans, &Stream),
        told: &Facts,
        context: &Context,
        cache: &mut Cache,
    ) -> Result<Var, Error> {
        let mut x = x.clone();
        for SubLayer { around, body } in &self.sub_layers {
            x = around.around(&x, |x| match body {
                SubLayerBody::SelfAttention(attention) => attention.forward_cached(x, spans, stream, cache),
                SubLayerBody::CrossAttention(_) => unreachable!("a decoder alone reads no other text"),
                SubLayerBody::FeedForward(feed_forward) => Ok(feed_forward.forward(x, stream, told, context)?.y),
            })?;
        }
        Ok(x)
    }

    pub(super) fn moe_layer(&mut self) -> Option<&mut MoeLayer> {
        self.sub_layers.iter_mut().find_map(|sub_layer| match &mut sub_layer.body {
            SubLayerBody::FeedForward(feed_forward) => feed_forward.moe_layer(),
            SubLayerBody::SelfAttention(_) | SubLayerBody::CrossAttention(_) => None,
        })
    }

    fn drop(&self, x: Var, place: u32, Pass { facts, context, .. }: &Pass) -> Var {
        let first = facts.first_token + facts.stream.tokens().start as u64;
        if context.trains { x.dropout(self.dropout, context.dropout(place), first) } else { x }
    }
}

impl SubLayerBody {
    /// What is added to the stream, and what a MoE layer says besides.
    fn forward(&self, x: &Var, Pass { facts, context, memory }: &Pass) -> Result<(Var, Option<LayerOutput>), Error> {
        match self {
            SubLayerBody::SelfAttention(attention) => Ok((attention.forward(x, &facts.spans, &facts.stream)?, None)),
            SubLayerBody::CrossAttention(attention) => {
                let (memory, across) = memory.zip(facts.across.as_ref()).expect("a text to read");
                Ok((attention.forward_across(x, &facts.stream, memory, across)?, None))
            }
            SubLayerBody::FeedForward(feed_forward) => {
                let place = (facts.first_token, facts.micro_batch, &facts.homes);
                let told = self::facts(&facts.importance, &facts.tokens, place, context);
                let output = feed_forward.forward(x, &facts.stream, &told, context)?;
                Ok((output.y, output.moe))
            }
        }
    }
}

impl Parameters for Block {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        for SubLayer { around, body } in &mut self.sub_layers {
            around.visit(f);
            match body {
                SubLayerBody::SelfAttention(attention) => attention.visit(f),
                SubLayerBody::CrossAttention(attention) => attention.visit(f),
                SubLayerBody::FeedForward(feed_forward) => feed_forward.visit(f),
            }
        }
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        for sub_layer in &mut self.sub_layers {
            if let SubLayerBody::FeedForward(feed_forward) = &mut sub_layer.body {
                feed_forward.visit_buffers(f);
            }
        }
    }
}
