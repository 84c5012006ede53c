//! How large a model and its step may be together: far beyond what any machine holds, and so small that sums of bytes over
//! all ranks are numbers.

use super::Config;
use super::rules::{Rule, conflict};
use crate::limits::Finding;

/// Parameters of a model, and elements that a step makes of its tokens.
const MOST: f64 = 1e16;

pub(super) const RULES: &[Rule] = &[
    Rule {
        key: "model.d_model",
        reads: &[
            "model.d_model",
            "model.family",
            "model.heads",
            "model.vocab",
            "model.layers",
            "model.d_ff",
            "model.seq",
            "model.source_seq",
            "moe.experts",
            "moe.d_expert",
            "moe.shared_experts",
        ],
        check: parameters_are_countable,
    },
    Rule {
        key: "train.batch_tokens",
        reads: &[
            "train.batch_tokens",
            "model.d_model",
            "model.vocab",
            "model.layers",
            "model.d_ff",
            "model.seq",
            "model.family",
            "model.heads",
            "moe.experts",
            "moe.top_k",
            "moe.d_expert",
            "moe.shared_experts",
        ],
        check: a_step_is_countable,
    },
];

/// Experts, choices of a token, and inner widths of an expert and of what every token passes through.
fn widths(config: &Config) -> [f64; 4] {
    let of = |n: usize| n as f64;
    let dense = of(config.model.d_ff.unwrap_or(4 * config.model.d_model));
    let Some(moe) = &config.moe else { return [0.0, 0.0, 0.0, dense] };
    let expert = moe.d_expert.map_or(dense, of);
    [of(moe.experts.largest()), of(moe.top_k), expert, dense + expert * of(moe.shared_experts)]
}

/// Width of the heads of a layer together.
fn heads_width(config: &Config) -> f64 {
    let heads = config.model.blueprint().heads;
    heads.heads as f64 * heads.head_dim.max(heads.value_dim()) as f64
}

/// As if every layer had experts and a dense feed-forward: within a small factor.
fn parameters_are_countable(config: &Config) -> Option<Finding> {
    let model = &config.model;
    let [experts, _, expert, dense] = widths(config);
    let (d, layers) = (model.d_model as f64, model.layers as f64);
    let tables = (2 * model.vocab + model.longest_row()) as f64 * d;
    let rank = model.blueprint().heads.latent.map_or(0, |latent| latent.kv_rank.max(latent.query_rank.unwrap_or(0)));
    let attention = 4.0 * heads_width(config) * (d + rank as f64) + d * (d + 2.0 * rank as f64);
    let parameters = tables + layers * (attention + 3.0 * d * (dense + experts * (expert + 1.0)));
    let what = "the model would have";
    let sizes = "model.layers, model.vocab, model.d_ff, moe.experts, moe.d_expert or moe.shared_experts";
    too_many(parameters, what, "parameters", sizes)
}

fn a_step_is_countable(config: &Config) -> Option<Finding> {
    let model = &config.model;
    let [experts, chosen, expert, dense] = widths(config);
    // Scores of attention are kept by some families.
    let scores = (model.heads * model.segment.unwrap_or(1)) as f64;
    let d = model.d_model as f64;
    let of_layer = 4.0 * (d + heads_width(config)) + dense + scores + experts + chosen * (2.0 * d + expert);
    let elements = config.train.batch_tokens as f64 * (model.vocab as f64 + model.layers as f64 * of_layer);
    let sizes = "model.d_model, model.layers, model.vocab, moe.top_k, moe.experts or moe.d_expert";
    too_many(elements, "a step would make", "numbers of its tokens", sizes)
}

fn too_many(number: f64, what: &str, of: &str, sizes: &str) -> Option<Finding> {
    if number <= MOST {
        return None;
    }
    let wrong = format!("together with the other sizes too large: {what} about {number:.0e} {of}, of at most {MOST:e}");
    conflict(wrong, format!("lower it, or {sizes}"))
}
