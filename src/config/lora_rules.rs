//! What `[lora]` may say of a model: which of its matrices there are, and how small they are.

use super::rules::{Rule, conflict};
use super::{Config, TrainedPart};
use crate::limits::Finding;
use crate::lora::Target;
use crate::model::Role;

/// Keys that say which matrices there are, and their sizes.
const MATRICES: &[&str] = &[
    "lora.rank",
    "lora.targets",
    "lora.experts",
    "model.family",
    "model.d_model",
    "model.heads",
    "model.kv_heads",
    "model.head_dim",
    "model.query_rank",
    "model.kv_rank",
    "model.rotary_dim",
    "model.value_dim",
    "model.d_ff",
    "model.layers",
    "moe.layers",
    "moe.experts",
    "moe.d_expert",
    "moe.shared_experts",
    "moe.residual",
];

pub(super) const RULES: &[Rule] = &[
    Rule { key: "train.only", reads: &["train.only", "lora"], check: adapters_are_trained_alone },
    Rule { key: "train.freeze", reads: &["train.freeze", "lora"], check: all_else_is_frozen },
    Rule { key: "lora.targets", reads: MATRICES, check: targets_exist },
    Rule { key: "lora.experts", reads: &["lora.experts", "moe.experts"], check: there_are_experts },
    Rule { key: "lora.rank", reads: MATRICES, check: ranks_are_low },
];

fn adapters_are_trained_alone(config: &Config) -> Option<Finding> {
    match (config.train.only?, &config.lora) {
        (TrainedPart::Lora, None) => conflict(
            "there are no adapters, the recipe has no [lora] section",
            "add one, for example with rank = 8, or leave the key out",
        ),
        (TrainedPart::All | TrainedPart::Experts, Some(_)) => {
            conflict("[lora] trains adapters and nothing else", "leave the key out, or the section")
        }
        _ => None,
    }
}

fn all_else_is_frozen(config: &Config) -> Option<Finding> {
    let both = config.lora.is_some() && !config.train.freeze.is_empty();
    both.then(|| Finding::new("[lora] freezes the whole model", "leave the key out"))
}

fn targets_exist(config: &Config) -> Option<Finding> {
    let (lora, all) = (config.lora.as_ref()?, config.model.projections(config.moe.as_ref()));
    let mut names: Vec<String> = all.iter().map(|it| format!("{:?}", it.target.name())).collect();
    names.dedup();
    let names = names.join(", ");
    if lora.targets.0.is_empty() && !lora.experts {
        return conflict("no matrix gets an adapter", format!("name some of {names}, or set lora.experts = true"));
    }
    let repeated = lora.targets.0.iter().enumerate().find(|(at, target)| lora.targets.0[..*at].contains(target));
    if let Some((_, target)) = repeated {
        return conflict(format!("{:?} is there twice", target.name()), "name it once");
    }
    let is_there = |target: &Target| *target == Target::All || all.iter().any(|it| it.target == *target);
    let missing = lora.targets.0.iter().find(|target| !is_there(target))?;
    conflict(format!("the model has no {:?}", missing.name()), format!("leave it out; this model has {names}"))
}

/// What a recipe without a model to begin with is told.
pub(super) fn remark(config: &Config) -> Option<String> {
    let is_random = config.lora.is_some() && config.train.init.is_none();
    let told = "[lora] trains adapters of a model that is not trained itself, and there is no train.init: its weights are \
                random, unless the run is resumed";
    is_random.then(|| told.to_owned())
}

fn there_are_experts(config: &Config) -> Option<Finding> {
    let because = config.model.lacks(Role::Experts, config.moe.as_ref())?;
    if !config.lora.as_ref()?.experts {
        return None;
    }
    conflict(format!("there are no experts, {because}"), "leave it out, or begin with a model that has experts")
}

/// A product of factors with an inner width above a matrix's sizes could be any matrix, at more cost.
fn ranks_are_low(config: &Config) -> Option<Finding> {
    let lora = config.lora.as_ref()?;
    let targeted =
        config.model.projections(config.moe.as_ref()).into_iter().filter(|it| lora.targets(it.target.name()));
    let experts = config.moe.iter().filter(|_| lora.experts).map(|moe| {
        let width = moe.expert_width(config.model.d_ff.unwrap_or(4 * config.model.d_model));
        ("an expert's matrices", width.min(config.model.d_model))
    });
    let named = targeted.map(|it| (it.target.name(), it.outputs.min(it.inputs)));
    let (what, least) = named.chain(experts).min_by_key(|(_, least)| *least)?;
    let wrong = || format!("more than the {least} rows or columns of {what}");
    (lora.rank > least).then(|| Finding::new(wrong(), format!("the largest valid value is {least}")))
}
