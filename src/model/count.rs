//! How many parameters a model has, and how many of them one token uses.

use super::{Family, Sizes};
use crate::moe::GateKind;

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
    let (d, v, biases) = (wide(model.d_model), wide(model.vocab), u128::from(sizes.has_biases()));
    let qkv = wide(model.heads + 2 * sizes.kv_heads()) * (d / wide(model.heads));
    let norm = d * (1 + biases);
    let positions = if model.family == Family::Gpt2 { wide(model.seq) * d } else { 0 };
    let attention = qkv * d + d * d + biases * (qkv + d);
    let head = if model.tie_embeddings { 0 } else { v * d };
    let common = v * d + positions + norm + head + wide(model.layers) * (attention + 2 * norm);
    let network = |f: u128| match model.family {
        Family::Gpt2 => 2 * d * f + f + d,
        Family::Mixtral => 3 * d * f,
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
