//! One block: a list of sub-layers, each added to the residual stream, with a norm before or after.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::ops::AttentionSpans;
use guildhall_tensor::{Device, Part, Tensor, Var};

use super::attention::{Attention, Surroundings};
use super::cache::Cache;
use super::context::LayerPlace;
use super::feed_forward::FeedForward;
use super::heads::HeadsAttention;
use super::norm::{Norm, Residual};
use super::stream_facts::StreamFacts;
use super::{Context, Role, Sizes, StackBlueprint, SubLayerKind};
use crate::moe::migration::FollowingWork;
use crate::moe::{BalanceLoss, Error, LayerOutput, MoeLayer, ResidualStream};
use crate::parallel::{Buffer, Mesh, Parameters, Stream, Weight};

/// Layer `index` of the model.
#[derive(Debug)]
pub(super) struct Block {
    index: usize,
    sub_layers: Vec<SubLayer>,
    /// Number of the first sub-layer's dropout among those of the model.
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

impl SubLayer {
    fn new(device: &Arc<Device>, kind: SubLayerKind, place: &LayerPlace, sizes: &Sizes, mesh: &Mesh) -> SubLayer {
        let (blueprint, name) = (sizes.blueprint(), &place.name);
        let norm = format!("{name}.{}", blueprint.norm_name(kind));
        let around = Residual {
            norm: Norm::new(device, &norm, sizes, mesh.is_sequence_parallel()),
            place: blueprint.norm_place,
        };
        let body = match kind {
            SubLayerKind::SelfAttention => SubLayerBody::SelfAttention(Attention::new(
                device,
                &format!("{name}.self_attn"),
                place.index,
                sizes,
                mesh,
            )),
            SubLayerKind::CrossAttention => {
                let attention = HeadsAttention::across(device, &format!("{name}.encoder_attn"), sizes, mesh);
                SubLayerBody::CrossAttention(Box::new(attention))
            }
            SubLayerKind::FeedForward => SubLayerBody::FeedForward(FeedForward::new(device, place, sizes, mesh)),
        };
        SubLayer { around, body }
    }

    /// The name under which errors, kernels and bytes are recorded.
    fn scope(&self) -> &'static str {
        match self.body {
            SubLayerBody::SelfAttention(_) => "attention",
            SubLayerBody::CrossAttention(_) => "cross attention",
            SubLayerBody::FeedForward(_) => "feed-forward",
        }
    }
}

/// What all blocks of a stack get besides their input.
#[derive(Clone, Default)]
pub(super) struct Given {
    /// The output of the preceding stack (the encoder), whose tokens cross-attention attends to.
    pub(super) memory: Option<Var>,
    /// `[distances, heads]`, added to the scores of self-attention.
    pub(super) bias: Option<Var>,
}

impl Given {
    /// From the values in this order, of which those that `like` has are there.
    fn of(like: [bool; 2], values: &[Var]) -> Given {
        let mut values = values.iter().cloned();
        let [memory, bias] = like.map(|is_there| if is_there { values.next() } else { None });
        Given { memory, bias }
    }
}

/// What a block needs besides its input.
struct Pass<'a> {
    facts: &'a StreamFacts,
    context: &'a Context,
    given: Given,
}

/// What a block needs besides its input where tokens follow cached ones.
pub(super) struct CachedPass<'a> {
    pub(super) facts: &'a StreamFacts,
    pub(super) context: &'a Context,
    /// Present if the tokens read another text.
    pub(super) memory: Option<MemoryKeys<'a>>,
    /// Added to the scores of self-attention.
    pub(super) bias: Option<&'a Var>,
}

/// What cross-attention needs to know of a text that is read again and again.
#[derive(Clone, Copy)]
pub(super) struct MemoryKeys<'a> {
    pub(super) keys_values: &'a [Tensor; 2],
    /// Which of them each token sees.
    pub(super) spans: &'a Rc<AttentionSpans>,
}

impl Block {
    /// Layer `index` of the model, which is one of the stack's layers.
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

    /// Runs the block on x `[T, D]`, the features of this rank's tokens. A block may run twice: the second time in
    /// backward.
    pub(super) fn forward(
        self: &Rc<Block>,
        x: &Var,
        given: &Given,
        facts: &Rc<StreamFacts>,
        context: &Rc<Context>,
    ) -> Result<(Var, Option<LayerOutput>), Error> {
        let (block, facts, context) = (self.clone(), facts.clone(), context.clone());
        let like = [&given.memory, &given.bias].map(Option::is_some);
        let run = move |inputs: &[Var]| -> Result<_, Error> {
            let pass = Pass { facts: &facts, context: &context, given: Given::of(like, &inputs[1..]) };
            let (x, moe) = block.run(&inputs[0], &pass)?;
            Ok(match moe {
                None => (vec![x], None),
                Some(LayerOutput { losses: BalanceLoss { balance, z }, counts, shadowed, migration, .. }) => {
                    (vec![x, balance, z], Some((counts, shadowed, migration)))
                }
            })
        };
        let inputs: Vec<&Var> = [x].into_iter().chain(&given.memory).chain(&given.bias).collect();
        let (outputs, counted) = x.tape().checkpoint(Part::Block, &inputs, run)?;
        let moe = counted.map(|(counts, shadowed, migration)| {
            let losses = BalanceLoss { balance: outputs[1].clone(), z: outputs[2].clone() };
            LayerOutput { y: outputs[0].clone(), is_added: true, losses, counts, shadowed, migration }
        });
        Ok((outputs[0].clone(), moe))
    }

    fn run(&self, x: &Var, pass: &Pass) -> Result<(Var, Option<LayerOutput>), Error> {
        let (mut x, mut moe) = (x.clone(), None);
        let last = self.first_place + self.sub_layers.len() as u32 - 1;
        for (place, sub_layer) in (self.first_place..).zip(&self.sub_layers) {
            x.tape().set_scope(format!("layer {} {}", self.index, sub_layer.scope()));
            let around = &sub_layer.around;
            // With dropout, the result and the residual stream cannot travel as one sum.
            let may_carry = pass.context.facts.routings.migration.is_some() && !self.drops(pass.context);
            let residual = may_carry.then(|| around.stream(&x));
            let (y, said) = sub_layer.body.forward(&around.before(&x), residual.as_ref(), pass)?;
            let migration = said.as_ref().and_then(|said| said.migration.clone());
            // A sub-layer behind it would need the facts of the new stream, which the stack makes for the next block.
            assert!(migration.is_none() || place == last, "only the last sub-layer of a block may move sequences");
            if said.as_ref().is_some_and(|said| said.is_added) {
                x = around.after_sum(y);
            } else {
                if let Some(migration) = &migration {
                    x = migration.apply(&x)?;
                }
                let stream = migration.as_ref().map_or(&pass.facts.stream, |migration| migration.stream());
                x = around.after(&x, &self.drop(y, place, stream, pass.context));
            }
            moe = moe.take().or(said);
        }
        Ok((x, moe))
    }

    /// The same for tokens that follow those in caches, without gradients: all of one text, or one of each of several.
    pub(super) fn forward_cached(&self, x: &Var, pass: &CachedPass, caches: &mut [&mut Cache]) -> Result<Var, Error> {
        let (mut x, CachedPass { facts, context, memory, bias }) = (x.clone(), pass);
        for SubLayer { around, body } in &self.sub_layers {
            let input = around.before(&x);
            let y = match body {
                SubLayerBody::SelfAttention(attention) => attend_cached(attention, &input, (facts, *bias), caches)?,
                SubLayerBody::CrossAttention(attention) => {
                    attention.forward_across_cached(&input, &facts.stream, memory.expect("a text to read"))?
                }
                SubLayerBody::FeedForward(feed_forward) => feed_forward.forward(&input, None, facts, context)?.y,
            };
            x = around.after(&x, &y);
        }
        Ok(x)
    }

    /// Keys and values of the block's cross-attention, of all tokens of another text.
    pub(super) fn keys_values(&self, memory: &Var, stream: &Stream) -> Result<[Tensor; 2], Error> {
        let across = self.sub_layers.iter().find_map(|sub_layer| match &sub_layer.body {
            SubLayerBody::CrossAttention(attention) => Some(attention),
            SubLayerBody::SelfAttention(_) | SubLayerBody::FeedForward(_) => None,
        });
        across.expect("a block that reads another text").keys_values(memory, stream)
    }

    /// Tells the block's MoE layers what follows them, if `behind` follows the block, and `pairs` is what an attention does
    /// beside its projections, on each of so many lanes. Returns what follows the block before.
    pub(super) fn foresee(
        &mut self,
        mut behind: FollowingWork,
        (pairs, lanes): (&FollowingWork, usize),
    ) -> FollowingWork {
        for SubLayer { body, .. } in self.sub_layers.iter_mut().rev() {
            match body {
                SubLayerBody::SelfAttention(attention) => behind = behind.after(pairs).with_products(attention, lanes),
                SubLayerBody::CrossAttention(attention) => {
                    behind = behind.after(pairs).with_products(&mut **attention, lanes)
                }
                SubLayerBody::FeedForward(feed_forward) => behind = feed_forward.foresee(behind, lanes),
            }
        }
        behind
    }

    pub(super) fn moe_layer(&mut self) -> Option<&mut MoeLayer> {
        self.sub_layers.iter_mut().find_map(|sub_layer| match &mut sub_layer.body {
            SubLayerBody::FeedForward(feed_forward) => feed_forward.moe_layer(),
            SubLayerBody::SelfAttention(_) | SubLayerBody::CrossAttention(_) => None,
        })
    }

    /// Whether dropout changes anything.
    fn drops(&self, context: &Context) -> bool {
        context.facts.trains && self.dropout > 0.0
    }

    fn drop(&self, x: Var, place: u32, stream: &Stream, context: &Context) -> Var {
        if self.drops(context) { x.dropout(self.dropout, context.dropout(place), stream.numbers()) } else { x }
    }
}

/// Self-attention of tokens to those in their caches and to themselves: of several texts, each has its own.
fn attend_cached(
    attention: &Attention,
    x: &Var,
    (facts, bias): (&StreamFacts, Option<&Var>),
    caches: &mut [&mut Cache],
) -> Result<Var, Error> {
    let among = Surroundings { spans: &facts.spans, bias };
    if let [cache] = caches {
        return attention.forward_cached(x, among, &facts.stream, cache);
    }
    let of_text = |(text, cache): (usize, &mut &mut Cache)| {
        attention.forward_cached(&x.gather_rows(&[text as u32]), among, &facts.stream, cache)
    };
    Ok(Var::concat_rows(caches.iter_mut().enumerate().map(of_text).collect::<Result<_, _>>()?))
}

impl SubLayerBody {
    /// What is added to the residual stream, and the output of the MoE layer if this is one.
    fn forward(
        &self,
        x: &Var,
        residual: Option<&ResidualStream>,
        Pass { facts, context, given: Given { memory, bias } }: &Pass,
    ) -> Result<(Var, Option<LayerOutput>), Error> {
        match self {
            SubLayerBody::SelfAttention(attention) => {
                let among = Surroundings { spans: &facts.spans, bias: bias.as_ref() };
                Ok((attention.forward(x, among, &facts.stream)?, None))
            }
            SubLayerBody::CrossAttention(attention) => {
                let (memory, across) = memory.as_ref().zip(facts.across.as_ref()).expect("a text to read");
                Ok((attention.forward_across(x, &facts.stream, memory, across)?, None))
            }
            SubLayerBody::FeedForward(feed_forward) => {
                let output = feed_forward.forward(x, residual, facts, context)?;
                Ok((output.y, output.moe))
            }
        }
    }
}

impl Block {
    pub(super) fn visit_roles(&mut self, f: &mut dyn FnMut(Role, &mut Weight)) {
        for SubLayer { around, body } in &mut self.sub_layers {
            around.visit(&mut |weight| f(Role::Norms, weight));
            let mut of_attention = |weight: &mut Weight| f(Role::Attention, weight);
            match body {
                SubLayerBody::SelfAttention(attention) => attention.visit(&mut of_attention),
                SubLayerBody::CrossAttention(attention) => attention.visit(&mut of_attention),
                SubLayerBody::FeedForward(feed_forward) => feed_forward.visit_roles(f),
            }
        }
    }
}

impl Parameters for Block {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.visit_roles(&mut |_, weight| f(weight));
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        for sub_layer in &mut self.sub_layers {
            if let SubLayerBody::FeedForward(feed_forward) = &mut sub_layer.body {
                feed_forward.visit_buffers(f);
            }
        }
    }
}
