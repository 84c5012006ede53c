//! The decoder: embedding, blocks, norm, head, loss.

use std::sync::Arc;

use guildhall_tensor::{Device, Tape, Tensor, Var};

use super::attention::{Spans, rotary};
use super::block::{BatchFacts, Block, facts};
use super::embedding::Embedding;
use super::generate::Caches;
use super::norm::Norm;
use super::{Context, Sizes};
use crate::data::{Batch, IGNORE};
use crate::moe::{Counts, Error, Importance, LayerOutput};
use crate::parallel::{Buffer, Mesh, Parameters, Placement, Spread, Weight};

/// A language model that reads left to right; this rank's share of it.
#[derive(Debug)]
pub struct Decoder {
    sizes: Sizes,
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: Norm,
    /// `[V, D]`; absent when the token table serves.
    head: Option<Weight>,
}

/// What a forward pass over a batch gives. Losses are this rank's part of sums over the step's tokens divided by the
/// step's valid tokens.
pub struct Forward {
    /// What to go back from: cross-entropy plus weighted auxiliary losses. Scalar.
    pub loss: Var,
    pub cross_entropy: f32,
    /// Summed over MoE layers, unweighted.
    pub balance: f32,
    pub z: f32,
    pub loads: Vec<LayerLoad>,
    /// Experts that visited the ranks of this rank's expert group, summed over MoE layers.
    pub shadowed: u64,
}

/// Where the tokens of one MoE layer went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerLoad {
    pub layer: usize,
    /// Of this rank's tokens.
    pub counts: Counts,
}

impl Decoder {
    /// A model with initial values. Values depend on `sizes` alone, not on the mesh.
    pub fn new(device: &Arc<Device>, sizes: &Sizes, mesh: &Mesh) -> Decoder {
        let (v, d) = (sizes.model.vocab, sizes.model.d_model);
        let head = || {
            let placement = Placement::new(Spread::Replicated, [("lm_head.weight".to_owned(), vec![v, d])]);
            Weight::new(device, placement, &[v, d], sizes.dtype, sizes.init())
        };
        Decoder {
            embedding: Embedding::new(device, sizes),
            blocks: (0..sizes.model.layers).map(|index| Block::new(device, index, sizes, mesh)).collect(),
            norm: Norm::new(device, "model.norm", sizes),
            head: (!sizes.model.tie_embeddings).then(head),
            sizes: sizes.clone(),
        }
    }

    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// The loss of a batch on `tape`. Collective: every rank calls it, also with a batch of no rows.
    ///
    /// # Errors
    /// What the expert group reports.
    pub fn forward(&self, tape: &Tape, batch: &Batch, context: &Context) -> Result<Forward, Error> {
        let (hidden, layers) = self.hidden(tape, batch, context)?;
        tape.set_scope("head");
        let head = tape.parameter(&self.head().parameter);
        let cross_entropy = hidden.linear_cross_entropy(&head, &batch.targets, context.per_token());
        let mut forward = Forward {
            cross_entropy: cross_entropy.value().scalar(),
            loss: cross_entropy,
            balance: 0.0,
            z: 0.0,
            loads: Vec::new(),
            shadowed: 0,
        };
        tape.set_scope("auxiliary losses");
        for (layer, output) in layers {
            forward.add(layer, output, &self.sizes);
        }
        Ok(forward)
    }

    /// Logits `[T, V]` of a batch, as f32.
    ///
    /// # Errors
    /// What the expert group reports.
    pub fn logits(&self, tape: &Tape, batch: &Batch, context: &Context) -> Result<Tensor, Error> {
        let (hidden, _) = self.hidden(tape, batch, context)?;
        Ok(hidden.logits(&tape.parameter(&self.head().parameter)))
    }

    fn hidden(&self, tape: &Tape, batch: &Batch, context: &Context) -> Result<(Var, Vec<(usize, LayerOutput)>), Error> {
        let valid = batch.targets.iter().map(|&target| target != IGNORE).collect();
        let facts = BatchFacts {
            spans: Spans::new(batch, &self.sizes),
            importance: Importance::new(&batch.segments, batch.seq, valid, context.per_token()),
            tokens: batch.tokens.clone(),
            first_token: batch.first_token,
        };
        tape.set_scope("embedding");
        let mut x = self.embedding.forward(tape, &batch.tokens, &batch.positions);
        if context.trains {
            x = x.dropout(self.sizes.model.dropout, context.dropout(0), batch.first_token);
        }
        let mut outputs = Vec::new();
        for (index, block) in self.blocks.iter().enumerate() {
            let (y, output) = block.forward(&x, &facts, context)?;
            x = y;
            outputs.extend(output.map(|output| (index, output)));
        }
        tape.set_scope("final norm");
        Ok((self.norm.forward(&x), outputs))
    }

    /// Logits `[V]` after `tokens`, which follow those already in `caches`, without gradients. Collective.
    ///
    /// # Errors
    /// What the expert group reports.
    ///
    /// # Panics
    /// On no tokens.
    pub fn next_logits(
        &self,
        device: &Arc<Device>,
        tokens: &[u32],
        caches: &mut Caches,
        context: &Context,
    ) -> Result<Tensor, Error> {
        let tape = Tape::inference(device);
        let positions = caches.advance(tokens.len());
        let importance = Importance::new(&vec![0; tokens.len()], tokens.len(), vec![true; tokens.len()], 1.0);
        let rotary = rotary(&positions, &self.sizes);
        let told = facts(&importance, tokens, u64::from(positions[0]), context);
        let mut x = self.embedding.forward(&tape, tokens, &positions);
        for (block, cache) in self.blocks.iter().zip(caches.layers()) {
            x = block.forward_cached(&x, rotary.as_ref(), &told, context, cache)?;
        }
        let last = self.norm.forward(&x.gather_rows(&[tokens.len() as u32 - 1]));
        Ok(last.logits(&tape.parameter(&self.head().parameter)))
    }

    /// Tells MoE layer `index` the loads of a whole optimizer step, over all ranks.
    pub fn end_step(&mut self, index: usize, load: &[u64]) {
        self.blocks[index].end_step(load);
    }

    fn head(&self) -> &Weight {
        self.head.as_ref().unwrap_or(&self.embedding.tokens)
    }
}

impl Forward {
    fn add(&mut self, layer: usize, output: LayerOutput, sizes: &Sizes) {
        let moe = sizes.moe.as_ref().expect("a MoE layer comes of a MoE section");
        let LayerOutput { losses, counts, shadowed, .. } = output;
        self.shadowed += shadowed.len() as u64;
        self.balance += losses.balance.value().scalar();
        self.z += losses.z.value().scalar();
        for (loss, weight) in [(losses.balance, moe.balance_weight), (losses.z, moe.z_weight)] {
            // A loss of no weight is reported but costs no backward.
            if weight != 0.0 {
                self.loss = self.loss.add(&loss.scale(weight));
            }
        }
        self.loads.push(LayerLoad { layer, counts });
    }
}

impl Parameters for Decoder {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.embedding.visit(f);
        self.blocks.iter_mut().for_each(|block| block.visit(f));
        self.norm.visit(f);
        self.head.iter_mut().for_each(f);
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        self.blocks.iter_mut().for_each(|block| block.visit_buffers(f));
    }
}
