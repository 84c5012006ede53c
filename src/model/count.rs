//! How many parameters a model has, and how many of them one token uses.

use super::norm::NormPlace;
use super::{Family, Positions, Sizes};
use crate::moe::{Activation, GateKind};

/// Parameters of the whole model, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub total: u64,
    /// All but the experts a token is not sent to.
    pub active: u64,
    /// Those that belong to experts.
    pub experts: u64,
}

/// Counts from the configuration alone, before any memory is taken.
pub fn count(sizes: &Sizes) -> Counts {
    let model = &sizes.model;
    let wide = |n: usize| n as u128;
    let (d, v) = (wide(model.d_model), wide(model.vocab));
    let norm = if model.family == Family::Mixtral { d } else { 2 * d };
    let learned = model.family.positions() == Positions::Learned;
    // One norm besides those of the blocks: the last, or the embedding's.
    let outer_norm = if learned || sizes.norms() == NormPlace::Before { norm } else { 0 };
    let embedding = v * d + if learned { wide(model.seq) * d } else { 0 } + outer_norm;
    let head = if model.tie_embeddings { 0 } else { v * d };
    let masked_head = if model.family == Family::Bert { d * d + d + norm + v } else { 0 };
    let common = embedding + head + masked_head + wide(model.layers) * (attention(sizes) + 2 * norm);
    let network = |f: u128| match sizes.activation() {
        Activation::Gelu | Activation::Relu => 2 * d * f + f + d,
        Activation::SwiGlu => 3 * d * f,
    };
    let (mut total, mut active, mut experts) = (common, common, 0);
    for layer in 0..model.layers {
        match sizes.moe_of(layer) {
            None => {
                total += network(wide(sizes.d_ff()));
                active += network(wide(sizes.d_ff()));
            }
            Some(moe) => {
                let routers = if moe.gate == GateKind::Noisy { 2 } else { 1 };
                let expert = network(wide(sizes.d_expert(moe)));
                let shared = match moe.shared_experts {
                    0 => 0,
                    n => network(wide(n) * wide(sizes.d_expert(moe))),
                };
                let residual = if moe.residual { expert + 2 * (d + 1) } else { 0 };
                let common = routers * wide(moe.experts) * d + shared + residual;
                total += common + expert * wide(moe.experts);
                active += common + expert * wide(moe.top_k);
                experts += expert * wide(moe.experts);
            }
        }
    }
    // Sizes are bounded, so the sums fit; numbers past 64 bits are of models that no machine holds.
    let narrow = |n: u128| u64::try_from(n).unwrap_or(u64::MAX);
    Counts { total: narrow(total), active: narrow(active), experts: narrow(experts) }
}

/// Parameters of one layer's attention.
fn attention(sizes: &Sizes) -> u128 {
    let (d, heads) = (sizes.model.d_model as u128, sizes.model.heads as u128);
    if sizes.model.family.positions() == Positions::Relative {
        // Queries, keys, values, distances and the way out; two biases of the scores.
        return 5 * d * d + 2 * d;
    }
    let qkv = (heads + 2 * sizes.kv_heads() as u128) * (d / heads);
    let biases = if sizes.attention_has_biases() { qkv + d } else { 0 };
    qkv * d + d * d + biases
}
