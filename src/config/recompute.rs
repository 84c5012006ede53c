//! What the keys of `[memory]` may be together with the model.

use super::Config;
use super::rules::{Rule, Unused, conflict};
use crate::limits::Finding;
use crate::memory::{RecomputeMode, RecomputedOp};

pub(super) const RULES: &[Rule] = &[Rule {
    key: "memory.recompute_operations",
    reads: &["memory.recompute", "memory.recompute_operations", "model.family", "model.layers", "moe.layers", "lora"],
    check: operations_exist,
}];

fn operations_exist(config: &Config) -> Option<Finding> {
    if config.memory.recompute != RecomputeMode::Operations {
        return None;
    }
    let operations = config.memory.recompute_operations.as_ref()?;
    if operations.is_empty() {
        return conflict("names no operation", "name some, or set memory.recompute to \"none\"");
    }
    let is_moe = |layer| config.moe.as_ref().is_some_and(|moe| moe.layers.contains(layer));
    if operations.contains(&RecomputedOp::Experts) && config.moe.is_none() {
        return conflict("there are no experts, the recipe has no [moe] section", "leave \"experts\" out");
    }
    // Between a product with an adapter and its term there is a sum to keep.
    let adapts = config.lora.as_ref().is_some_and(|lora| lora.experts);
    let fused = !adapts && config.model.blueprint().fuses_experts() && (0..config.model.layers).all(is_moe);
    if operations.contains(&RecomputedOp::Activations) && fused {
        let wrong = "gated experts make their activations again as it is, and every layer is MoE";
        return conflict(wrong, "leave \"activations\" out");
    }
    None
}

pub(super) const UNUSED: &[Unused] = &[
    Unused {
        key: "memory.recompute_operations",
        reads: &["memory.recompute"],
        because: |config| match config.memory.recompute {
            RecomputeMode::None => Some("memory.recompute = \"none\" makes nothing again"),
            RecomputeMode::Block => Some("memory.recompute = \"block\" makes every operation of a block again"),
            RecomputeMode::Operations => None,
        },
    },
    Unused {
        key: "memory.keep_communication",
        reads: &["memory.recompute", "parallel.ranks"],
        because: |config| match config.memory.recompute {
            RecomputeMode::None => Some("memory.recompute = \"none\" makes nothing again"),
            RecomputeMode::Operations => Some("no operation that memory.recompute = \"operations\" names communicates"),
            RecomputeMode::Block => (config.parallel.ranks == 1).then_some("parallel.ranks = 1 has nobody to send to"),
        },
    },
];
