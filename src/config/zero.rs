//! What `parallel.zero` and the optimizer's keys of `[memory]` may be together with the mesh.

use super::Config;
use super::problem::Finding;
use super::rules::{Rule, Unused, conflict};
use crate::memory::Offload;

pub(super) const RULES: &[Rule] = &[Rule {
    key: "parallel.zero",
    reads: &["parallel.zero", "parallel.ranks", "parallel.tensor"],
    check: somebody_shares,
}];

fn somebody_shares(config: &Config) -> Option<Finding> {
    let shape = config.parallel.shape();
    if config.parallel.zero == 0 || shape.ranks >= 2 * shape.tensor {
        return None;
    }
    let wrong = format!(
        "nobody to share with: each of the {} ranks is the only one to hold its weights (parallel.tensor = {})",
        shape.ranks, shape.tensor
    );
    let least = 2 * shape.tensor;
    conflict(wrong, format!("set it to 0, or parallel.ranks to a multiple of parallel.tensor from {least} on"))
}

pub(super) const UNUSED: &[Unused] = &[Unused {
    key: "memory.offload_dir",
    reads: &["memory.offload"],
    because: |config| {
        let stays = config.memory.offload != Offload::File;
        stays.then_some("only memory.offload = \"file\" writes files")
    },
}];

/// What a stage does not do on this mesh.
pub(super) fn remark(config: &Config) -> Option<String> {
    let (shape, zero) = (config.parallel.shape(), config.parallel.zero);
    (zero > 0 && config.moe.is_some() && shape.is_possible() && shape.expert_data() == 1).then(|| {
        format!(
            "parallel.zero = {zero} saves nothing on experts: with parallel.expert = {} every expert is on one rank \
             alone, which keeps all that belongs to it",
            shape.expert
        )
    })
}
