//! Bytes per rank by cause, before anything is allocated.
//!
//! Activations are what the tape keeps of one micro-batch, layer by layer, plus what is alive for a moment at the
//! backward's widest point. Experts are assumed evenly loaded; `Load::imbalance` scales their rows.

use guildhall_tensor::ops::reach;
use guildhall_tensor::{Dtype, Part, Recompute};

use crate::model::{Positions, Sizes, count};
use crate::moe::Activation;

/// What one rank does at once.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Tokens of this rank in one micro-batch.
    pub tokens: usize,
    /// Ranks that share one set of experts.
    pub expert_ranks: usize,
    /// Rows on the fullest rank over the mean.
    pub imbalance: f64,
    /// What runs again in backward.
    pub recompute: Recompute,
}

/// Bytes of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    pub parameters: u64,
    pub gradients: u64,
    pub optimizer: u64,
    pub activations: u64,
}

impl Estimate {
    pub fn total(&self) -> u64 {
        [self.gradients, self.optimizer, self.activations]
            .iter()
            .fold(self.parameters, |sum, &bytes| sum.saturating_add(bytes))
    }
}

/// The memory of one rank of a training run.
pub fn estimate(sizes: &Sizes, load: &Load) -> Estimate {
    let counts = count(sizes);
    let parameters = counts.total - counts.experts + counts.experts / load.expert_ranks as u64;
    let stored = sizes.dtype.bytes() as u64;
    let masters = if sizes.dtype == Dtype::F32 { 0 } else { 4 };
    Estimate {
        parameters: parameters.saturating_mul(stored),
        gradients: parameters.saturating_mul(stored),
        optimizer: parameters.saturating_mul(8 + masters),
        activations: activations(sizes, load),
    }
}

/// Rows of logits that the head makes at a time.
const HEAD_ROWS: f64 = 256.0;

fn activations(sizes: &Sizes, load: &Load) -> u64 {
    let model = &sizes.model;
    let (t, d) = (load.tokens as f64, model.d_model as f64);
    let head_dim = d / model.heads as f64;
    let qkv = d + 2.0 * sizes.kv_heads() as f64 * head_dim;
    // What ops keep: per layer two normed copies, the two running sums, the fused projection, attention's value.
    let mut kept = t * d;
    let (mut widest, mut recomputed): (f64, f64) = (0.0, 0.0);
    let again = |part| load.recompute.parts.contains(&part);
    for layer in 0..model.layers {
        let before = kept;
        kept += t * (5.0 * d + qkv);
        let gates = if sizes.activation() == Activation::SwiGlu { 2.0 } else { 1.0 };
        let (rows, inner, own) = match sizes.moe_of(layer) {
            None => (t, sizes.d_ff() as f64, 1.0),
            // Rows as the experts got them and as they came back; SwiGLU experts compute their product again.
            Some(moe) => {
                let rows = t * moe.top_k as f64 * load.imbalance;
                kept += rows * 2.0 * d;
                let beside = moe.shared_experts + usize::from(moe.residual);
                kept += t * 2.0 * (beside * sizes.d_expert(moe)) as f64;
                // Both results that a residual layer mixes, for the proportions' gradient.
                kept += if moe.residual { t * 2.0 * d } else { 0.0 };
                (rows, sizes.d_expert(moe) as f64, 2.0 - gates)
            }
        };
        kept += rows * (gates + own) * inner;
        // Going back through an expert: its hidden values or their gradients, and those of its rows.
        widest = widest.max(rows * ((gates + own) * inner + 2.0 * d));
        let (hidden, is_moe) = (rows * (gates + own) * inner, sizes.moe_of(layer).is_some());
        let travelled = if is_moe && load.expert_ranks > 1 { rows * 2.0 * d } else { 0.0 };
        let whole = kept - before;
        if again(Part::Block) {
            // The input, and what came from other ranks; the rest of one block at a time is there again in backward.
            kept = before + t * d + if load.recompute.keep_communication { travelled } else { 0.0 };
            recomputed = recomputed.max(whole - (kept - before));
        }
        kept -= if again(Part::Attention) { t * d } else { 0.0 };
        if is_moe && again(Part::Experts) {
            kept -= hidden;
            recomputed = recomputed.max(hidden);
        } else if again(Part::Activation) {
            kept -= rows * own * inner;
        }
    }
    if model.family.positions() == Positions::Relative {
        let (segment, memory) = sizes.segment_and_memory();
        let distances = (reach(model.seq, segment, memory) * model.d_model) as f64;
        // Each layer projects the waves of all distances; going back, every row has gradients of its own for them, and
        // keys and values have two.
        kept += model.layers as f64 * 2.0 * distances;
        widest = widest.max(t / model.seq as f64 * distances + 5.0 * t * d);
    }
    let vocab = model.vocab as f64;
    // A block of logits, and the gradients of the head's weights and inputs that are made of it.
    let head = t.min(HEAD_ROWS) * vocab + vocab * d + t * d;
    let stored = sizes.dtype.bytes() as f64;
    // The head's memory is free again before the blocks' own gradients are needed; both count from the same kept layers.
    ((kept + recomputed) * stored + 4.0 * (head + 2.0 * t * d).max(widest)) as u64
}
