//! What `parallel.zero` and the optimizer's keys of `[memory]` may be together with the mesh.

use super::Config;
use super::problem::Origin;
use super::rules::{Rule, Unused, conflict};
use super::shares;
use crate::limits::Finding;
use crate::memory::Offload;

pub(super) const RULES: &[Rule] = &[
    Rule {
        key: "parallel.zero",
        reads: &["parallel.zero", "parallel.ranks", "parallel.tensor", "parallel.expert", "parallel.expert_tensor"],
        check: somebody_shares,
    },
    Rule { key: "memory.budget", reads: &["memory.budget"], check: budget_is_an_amount },
];

fn budget_is_an_amount(config: &Config) -> Option<Finding> {
    let budget = config.memory.budget.as_ref()?;
    let remedy = "give a number of bytes above 0, or text such as \"512 MiB\" or \"2 GB\"";
    budget.bytes().is_none_or(|bytes| bytes == 0).then(|| Finding::new("not an amount of memory", remedy))
}

/// Whether no weight has a second holder, but for those that see split tokens.
pub(super) fn is_alone(config: &Config) -> bool {
    let (shape, shapes) = (config.parallel.shape(), config.parallel.shapes());
    let experts_are_shared = shapes.iter().any(|shape| shape.is_possible() && shape.expert_data() > 1);
    shape.ranks < 2 * shape.tensor && !(config.moe.is_some() && experts_are_shared)
}

fn somebody_shares(config: &Config) -> Option<Finding> {
    let shape = config.parallel.shape();
    if config.parallel.zero == 0 || !is_alone(config) {
        return None;
    }
    let wrong = format!(
        "nobody to share with: each of the {} ranks is the only one to hold its weights (parallel.tensor = {})",
        shape.ranks, shape.tensor
    );
    let least = 2 * shape.tensor;
    conflict(wrong, format!("set it to 0, or parallel.ranks to a multiple of parallel.tensor from {least} on"))
}

/// A stage in a recipe is a wish for the ranks it was written for: where `--ranks` leaves nobody to share with, none is
/// used. Of a stage given on the command line there is no `origin`.
pub(super) fn fit(config: &mut Config, origin: Option<Origin>) -> Option<String> {
    let origin = origin?;
    if config.parallel.zero == 0 || !is_alone(config) {
        return None;
    }
    let zero = std::mem::take(&mut config.parallel.zero);
    Some(format!(
        "parallel.zero = {zero} ({origin}) has nobody to share with on {} rank(s); 0 is used instead",
        config.parallel.ranks
    ))
}

pub(super) const UNUSED: &[Unused] = &[Unused {
    key: "memory.offload_dir",
    reads: &["memory.offload"],
    because: |config| {
        let stays = config.memory.offload != Offload::File;
        stays.then_some("only memory.offload = \"file\" writes files")
    },
}];

/// What moves nothing, and why.
pub(super) const IDLE: &[Unused] = &[Unused {
    key: "memory.tile",
    reads: &[
        "memory.tile",
        "parallel",
        "model",
        "moe.experts",
        "moe.d_expert",
        "moe.layers",
        "moe.shared_experts",
        "train.only",
        "train.freeze",
    ],
    because: |config| {
        let whole = config.memory.tile? >= shares::largest(config)?;
        whole.then_some("no rank has state of more elements of a weight, so that each is updated at once as it is")
    },
}];

/// What a stage does not do on this mesh.
pub(super) fn remark(config: &Config) -> Option<String> {
    let (shapes, zero) = (config.parallel.shapes(), config.parallel.zero);
    let shape = shapes.iter().find(|shape| shape.is_possible() && shape.expert_data() == 1)?;
    (zero > 0 && config.moe.is_some()).then(|| {
        let layers = if shapes.len() > 1 { " of such layers" } else { "" };
        format!(
            "parallel.zero = {zero} saves nothing on experts{layers}: with parallel.expert = {} every expert is on one \
             rank alone, which keeps all that belongs to it",
            shape.expert
        )
    })
}
