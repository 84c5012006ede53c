//! One block: attention, then feed-forward, each added to the residual stream, with a norm before or after.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::{Device, Part, Var};

use super::attention::{Attention, Cache, Spans};
use super::context::OwnContext;
use super::feed_forward::FeedForward;
use super::norm::{Norm, Residual};
use super::{Context, NormNames, Sizes};
use crate::moe::{BalanceLoss, Error, Facts, Homes, Importance, LayerOutput, MoeLayer};
use crate::parallel::{Buffer, Mesh, Parameters, Stream, Weight};

/// Layer `index` of the model.
#[derive(Debug)]
pub(super) struct Block {
    index: usize,
    around_attention: Residual,
    attention: Attention,
    around_feed_forward: Residual,
    feed_forward: FeedForward,
    dropout: f32,
}

/// A block's facts about a batch.
pub(super) struct BatchFacts {
    pub(super) spans: Spans,
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

impl Block {
    pub(super) fn new(device: &Arc<Device>, index: usize, sizes: &Sizes, mesh: &Mesh) -> Block {
        let name = format!("model.layers.{index}");
        let (blueprint, partial) = (sizes.blueprint(), mesh.is_sequence_parallel());
        let place = blueprint.norm_place;
        let norms = match blueprint.norm_names {
            NormNames::Llama => ["input_layernorm", "post_attention_layernorm"],
            NormNames::Fairseq => ["self_attn_layer_norm", "final_layer_norm"],
        };
        let [around_attention, around_feed_forward] =
            norms.map(|norm| Residual { norm: Norm::new(device, &format!("{name}.{norm}"), sizes, partial), place });
        Block {
            index,
            around_attention,
            attention: Attention::new(device, &format!("{name}.self_attn"), sizes, mesh),
            around_feed_forward,
            feed_forward: FeedForward::new(device, &name, index, sizes, mesh),
            dropout: sizes.model.dropout,
        }
    }

    /// x `[T, D]`, the tokens of the stream that are here. A block may run twice: the second time in
    /// backward.
    pub(super) fn forward(
        self: &Rc<Block>,
        x: &Var,
        facts: &Rc<BatchFacts>,
        context: &Context,
    ) -> Result<(Var, Option<LayerOutput>), Error> {
        let (block, facts, context) = (self.clone(), facts.clone(), OwnContext::new(context));
        let run = move |inputs: &[Var]| -> Result<_, Error> {
            let (x, moe) = block.run(&inputs[0], &facts, &context.context())?;
            Ok(match moe {
                None => (vec![x], None),
                Some(LayerOutput { losses: BalanceLoss { balance, z }, counts, shadowed, .. }) => {
                    (vec![x, balance, z], Some((counts, shadowed)))
                }
            })
        };
        let (outputs, counted) = x.tape().checkpoint(Part::Block, &[x], run)?;
        let moe = counted.map(|(counts, shadowed)| {
            let losses = BalanceLoss { balance: outputs[1].clone(), z: outputs[2].clone() };
            LayerOutput { y: outputs[0].clone(), losses, counts, shadowed }
        });
        Ok((outputs[0].clone(), moe))
    }

    fn run(&self, x: &Var, facts: &BatchFacts, context: &Context) -> Result<(Var, Option<LayerOutput>), Error> {
        let tape = x.tape();
        tape.set_scope(format!("layer {} attention", self.index));
        let x = self
            .around_attention
            .around(x, |x| Ok(self.drop(self.attention.forward(x, &facts.spans, &facts.stream)?, 0, facts, context)))?;
        tape.set_scope(format!("layer {} feed-forward", self.index));
        let place = (facts.first_token, facts.micro_batch, &facts.homes);
        let told = self::facts(&facts.importance, &facts.tokens, place, context);
        let mut moe = None;
        let x = self.around_feed_forward.around(&x, |x| {
            let output = self.feed_forward.forward(x, &facts.stream, &told, context)?;
            moe = output.moe;
            Ok(self.drop(output.y, 1, facts, context))
        })?;
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
        let x = self.around_attention.around(x, |x| self.attention.forward_cached(x, spans, stream, cache))?;
        self.around_feed_forward.around(&x, |x| Ok(self.feed_forward.forward(x, stream, told, context)?.y))
    }

    pub(super) fn moe_layer(&mut self) -> Option<&mut MoeLayer> {
        self.feed_forward.moe_layer()
    }

    fn drop(&self, x: Var, which: u32, facts: &BatchFacts, context: &Context) -> Var {
        // Place 0 is the embedding's.
        let place = 1 + 2 * self.index as u32 + which;
        let first = facts.first_token + facts.stream.tokens().start as u64;
        if context.trains { x.dropout(self.dropout, context.dropout(place), first) } else { x }
    }
}

impl Parameters for Block {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.around_attention.visit(f);
        self.attention.visit(f);
        self.around_feed_forward.visit(f);
        self.feed_forward.visit(f);
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        self.feed_forward.visit_buffers(f);
    }
}
