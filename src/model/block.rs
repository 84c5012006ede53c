//! One block: attention, then feed-forward, each on a normed copy and added to the residual stream.

use std::sync::Arc;

use guildhall_tensor::ops::KvCache;
use guildhall_tensor::{Device, Var};

use super::attention::{Attention, Spans};
use super::feed_forward::FeedForward;
use super::norm::Norm;
use super::{Context, Sizes};
use crate::moe::{Error, Facts, Importance, LayerOutput};
use crate::parallel::{Buffer, Mesh, Parameters, Weight};

/// Layer `index` of the decoder.
#[derive(Debug)]
pub(super) struct Block {
    index: usize,
    attention_norm: Norm,
    attention: Attention,
    feed_forward_norm: Norm,
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
}

/// What a feed-forward is told about tokens.
pub(super) fn facts<'a>(importance: &'a Importance, ids: &'a [u32], first: u64, context: &Context<'a>) -> Facts<'a> {
    Facts {
        importance,
        ids,
        first,
        seed: context.seed,
        step: context.step,
        trains: context.trains,
        routings: context.routings,
    }
}

impl Block {
    pub(super) fn new(device: &Arc<Device>, index: usize, sizes: &Sizes, mesh: &Mesh) -> Block {
        let name = format!("model.layers.{index}");
        Block {
            index,
            attention_norm: Norm::new(device, &format!("{name}.input_layernorm"), sizes),
            attention: Attention::new(device, &format!("{name}.self_attn"), sizes),
            feed_forward_norm: Norm::new(device, &format!("{name}.post_attention_layernorm"), sizes),
            feed_forward: FeedForward::new(device, &name, index, sizes, mesh),
            dropout: sizes.model.dropout,
        }
    }

    /// x `[T, D]`.
    pub(super) fn forward(
        &self,
        x: &Var,
        facts: &BatchFacts,
        context: &Context,
    ) -> Result<(Var, Option<LayerOutput>), Error> {
        let tape = x.tape();
        tape.set_scope(format!("layer {} attention", self.index));
        let attended = self.attention.forward(&self.attention_norm.forward(x), &facts.spans);
        let x = x.add(&self.drop(attended, 0, facts, context));
        tape.set_scope(format!("layer {} feed-forward", self.index));
        let told = self::facts(&facts.importance, &facts.tokens, facts.first_token, context);
        let output = self.feed_forward.forward(&self.feed_forward_norm.forward(&x), &told, context)?;
        Ok((x.add(&self.drop(output.y, 1, facts, context)), output.moe))
    }

    /// The same for tokens that follow those in `cache`, without gradients.
    pub(super) fn forward_cached(
        &self,
        x: &Var,
        rotary: Option<&(Vec<f32>, Vec<f32>)>,
        told: &Facts,
        context: &Context,
        cache: &mut KvCache,
    ) -> Result<Var, Error> {
        let x = x.add(&self.attention.forward_cached(&self.attention_norm.forward(x), rotary, cache));
        let output = self.feed_forward.forward(&self.feed_forward_norm.forward(&x), told, context)?;
        Ok(x.add(&output.y))
    }

    /// Tells a MoE layer the loads of a whole optimizer step, over all ranks.
    pub(super) fn end_step(&mut self, load: &[u64]) {
        self.feed_forward.end_step(load);
    }

    fn drop(&self, x: Var, which: u32, facts: &BatchFacts, context: &Context) -> Var {
        // Place 0 is the embedding's.
        let place = 1 + 2 * self.index as u32 + which;
        if context.trains { x.dropout(self.dropout, context.dropout(place), facts.first_token) } else { x }
    }
}

impl Parameters for Block {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.attention_norm.visit(f);
        self.attention.visit(f);
        self.feed_forward_norm.visit(f);
        self.feed_forward.visit(f);
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        self.feed_forward.visit_buffers(f);
    }
}
