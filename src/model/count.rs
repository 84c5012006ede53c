//! How many parameters a model has, and how many of them one token uses.

use super::{Family, Sizes};

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
    let (d, v, biases) = (model.d_model as u64, model.vocab as u64, u64::from(sizes.has_biases()));
    let head_dim = d / model.heads as u64;
    let qkv = (model.heads + 2 * sizes.kv_heads()) as u64 * head_dim;
    let norm = d * (1 + biases);
    let positions = if model.family == Family::Gpt2 { model.seq as u64 * d } else { 0 };
    let attention = qkv * d + d * d + biases * (qkv + d);
    let head = if model.tie_embeddings { 0 } else { v * d };
    let common = v * d + positions + norm + head + model.layers as u64 * (attention + 2 * norm);
    let network = |f: u64| match model.family {
        Family::Gpt2 => 2 * d * f + f + d,
        Family::Mixtral => 3 * d * f,
    };
    let mut counts = Counts { total: common, active: common, experts: 0 };
    for layer in 0..model.layers {
        match sizes.moe_of(layer) {
            None => {
                counts.total += network(sizes.d_ff() as u64);
                counts.active += network(sizes.d_ff() as u64);
            }
            Some(moe) => {
                let (expert, router) = (network(sizes.d_expert(moe) as u64), moe.experts as u64 * d);
                counts.total += router + expert * moe.experts as u64;
                counts.active += router + expert * moe.top_k as u64;
                counts.experts += expert * moe.experts as u64;
            }
        }
    }
    counts
}
