//! The values a number of a recipe may take by itself: one table, a line a key.

use crate::limits::{Bounds, Edge, SIZE_MAX, above_zero, from_zero, whole, zero_to};

const COUNT_MAX: i64 = 1 << 31;
/// What grows with a model's depth is walked layer by layer.
const LAYERS_MAX: i64 = 1 << 13;
/// What is planned may be larger than what runs here.
pub(super) const RANKS_MAX: i64 = 1 << 16;

/// At most a thousand seconds.
pub(super) const LATENCY_US: Bounds = zero_to(Edge::Allowed(1e9), 20.0);

/// At least a kilobyte a second, so that the time of any message is a time.
pub(super) const GBYTES_PER_S: Bounds = Bounds::Real { low: Edge::Allowed(1e-6), high: Edge::Open, usual: 10.0 };

/// A similarity; above 1 no rows are similar enough.
const COSINE: Bounds = Bounds::Real { low: Edge::Allowed(-1.0), high: Edge::Allowed(2.0), usual: 0.9 };

/// Every number of a recipe but those of gates, whose files have their own; a test holds that none is left out.
pub(super) const BOUNDS: &[(&str, Bounds)] = &[
    ("train.steps", whole(1, i64::MAX)),
    ("train.seed", whole(0, i64::MAX)),
    ("train.batch_tokens", whole(1, COUNT_MAX)),
    ("train.micro_batch", whole(1, COUNT_MAX)),
    ("train.lr", above_zero(3e-4)),
    ("train.warmup_steps", whole(0, i64::MAX)),
    ("train.lr_end", zero_to(Edge::Allowed(1.0), 0.1)),
    ("train.weight_decay", from_zero(0.1)),
    ("train.beta1", zero_to(Edge::Forbidden(1.0), 0.9)),
    ("train.beta2", zero_to(Edge::Forbidden(1.0), 0.95)),
    ("train.eps", above_zero(1e-8)),
    ("train.clip", from_zero(1.0)),
    ("train.checkpoint_every", whole(0, i64::MAX)),
    ("train.checkpoint_file_mib", whole(0, COUNT_MAX)),
    ("train.checkpoint_timeout_s", whole(1, COUNT_MAX)),
    ("train.keep", whole(0, COUNT_MAX)),
    ("train.check_replicas_every", whole(0, i64::MAX)),
    ("train.eval_every", whole(0, i64::MAX)),
    ("train.eval_rows", whole(0, COUNT_MAX)),
    ("parallel.ranks", whole(1, RANKS_MAX)),
    ("parallel.expert", whole(1, RANKS_MAX)),
    ("parallel.tensor", whole(1, RANKS_MAX)),
    ("parallel.expert_tensor", whole(1, RANKS_MAX)),
    ("parallel.zero", whole(0, 3)),
    ("parallel.replace_every", whole(0, i64::MAX)),
    ("parallel.replace_gain", zero_to(Edge::Forbidden(1.0), 0.05)),
    ("parallel.threads", whole(1, 1024)),
    ("parallel.migrate_candidates", whole(1, RANKS_MAX)),
    ("parallel.migrate_slack", from_zero(0.25)),
    ("parallel.timeout_s", whole(1, COUNT_MAX)),
    ("parallel.bucket_bytes", whole(1, i64::MAX)),
    ("parallel.link.latency_us", LATENCY_US),
    ("parallel.link.message_us", LATENCY_US),
    ("parallel.link.gbytes_per_s", GBYTES_PER_S),
    ("parallel.node_link.ranks_per_node", whole(1, 1024)),
    ("parallel.node_link.latency_us", LATENCY_US),
    ("parallel.node_link.message_us", LATENCY_US),
    ("parallel.node_link.gbytes_per_s", GBYTES_PER_S),
    ("memory.tile", whole(1, i64::MAX)),
    ("model.vocab", whole(1, 1 << 24)),
    ("model.d_model", whole(1, SIZE_MAX)),
    ("model.layers", whole(1, LAYERS_MAX)),
    ("model.encoder_layers", whole(1, LAYERS_MAX)),
    ("model.decoder_layers", whole(1, LAYERS_MAX)),
    ("model.heads", whole(1, SIZE_MAX)),
    ("model.kv_heads", whole(1, SIZE_MAX)),
    ("model.head_dim", whole(1, SIZE_MAX)),
    ("model.query_rank", whole(0, SIZE_MAX)),
    ("model.kv_rank", whole(1, SIZE_MAX)),
    ("model.content_dim", whole(1, SIZE_MAX)),
    ("model.rotary_dim", whole(2, SIZE_MAX)),
    ("model.value_dim", whole(1, SIZE_MAX)),
    ("model.window", whole(1, SIZE_MAX)),
    ("model.rope_factor", Bounds::Real { low: Edge::Allowed(1.0), high: Edge::Open, usual: 32.0 }),
    ("model.rope_pretrained", whole(1, SIZE_MAX)),
    ("model.d_ff", whole(1, 4 * SIZE_MAX)),
    ("model.seq", whole(1, SIZE_MAX)),
    ("model.source_seq", whole(1, SIZE_MAX)),
    ("model.segment", whole(1, SIZE_MAX)),
    ("model.memory", whole(0, SIZE_MAX)),
    ("model.dropout", zero_to(Edge::Forbidden(1.0), 0.1)),
    ("model.rope_theta", above_zero(10_000.0)),
    ("model.norm_eps", above_zero(1e-5)),
    ("model.init_std", above_zero(0.02)),
    ("moe.experts", whole(1, SIZE_MAX)),
    ("moe.top_k", whole(1, SIZE_MAX)),
    ("moe.d_expert", whole(1, 4 * SIZE_MAX)),
    ("moe.capacity_factor", above_zero(1.25)),
    ("moe.eval_capacity_factor", above_zero(2.0)),
    ("moe.jitter", zero_to(Edge::Forbidden(1.0), 0.01)),
    ("moe.output_masking", zero_to(Edge::Forbidden(1.0), 0.2)),
    ("moe.group_tokens", whole(1, COUNT_MAX)),
    ("moe.logical_nodes", whole(1, SIZE_MAX)),
    ("moe.shared_experts", whole(0, SIZE_MAX)),
    ("moe.condense_threshold", COSINE),
    ("moe.condense_tokens", whole(2, COUNT_MAX)),
    ("moe.condense_compared", whole(2, 1 << 16)),
    ("moe.condense_history", COSINE),
    ("moe.condense_range", COSINE),
    ("moe.condense_slope", from_zero(4.0)),
    ("moe.condense_warmup", whole(0, i64::MAX)),
    ("moe.schedule_groups", whole(1, 1024)),
    ("moe.balance_weight", from_zero(0.01)),
    ("moe.z_weight", from_zero(0.001)),
    ("moe.dead_after", whole(1, i64::MAX)),
    ("moe.pairs_every", whole(0, i64::MAX)),
    ("lora.rank", whole(1, SIZE_MAX)),
    ("lora.alpha", above_zero(16.0)),
    ("data.held_out", zero_to(Edge::Allowed(0.5), 0.01)),
    ("data.mask_rate", Bounds::Real { low: Edge::Forbidden(0.0), high: Edge::Allowed(1.0), usual: 0.15 }),
    ("data.max_bytes", whole(1, i64::MAX)),
    ("data.temperature", above_zero(5.0)),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::config::read;
    use crate::config::rejection::Expected;
    use crate::moe;

    #[test]
    fn every_number_of_a_recipe_has_bounds() {
        let paths = read::paths::<Config>();
        let lists = ["parallel.expert", "moe.experts", "moe.condense_history", "moe.condense_range"];
        let is_of_a_gate = |path: &str| {
            let key = path.strip_prefix("moe.gate.");
            key.is_some_and(|key| !moe::Config::gates_with(key).is_empty())
        };
        let is_number =
            |path: &str, e: &Expected| matches!(e, Expected::Whole | Expected::Number) || lists.contains(&path);
        let numbers: Vec<&String> = paths.iter().filter(|(path, e)| is_number(path, e)).map(|(path, _)| path).collect();
        for path in &numbers {
            assert!(BOUNDS.iter().any(|(key, _)| key == path) || is_of_a_gate(path), "{path} has no bounds");
        }
        assert_eq!(
            numbers.len(),
            BOUNDS.len() + numbers.iter().filter(|path| is_of_a_gate(path)).count(),
            "bounds of keys that are no numbers"
        );
    }
}
