//! Which parts of the model are trained: `train.only` and `train.freeze`.

use super::rules::{Rule, Unused, conflict};
use super::{Config, TrainedPart};
use crate::limits::Finding;
use crate::model::Role;

/// Keys that say which parts there are.
const PARTS: &[&str] = &[
    "train.only",
    "train.freeze",
    "model.family",
    "model.layers",
    "model.tie_embeddings",
    "moe.layers",
    "moe.shared_experts",
    "moe.residual",
];

pub(super) const RULES: &[Rule] = &[
    Rule { key: "train.only", reads: &["train.only", "moe.experts"], check: there_are_experts },
    Rule { key: "train.freeze", reads: PARTS, check: frozen_parts_exist },
    Rule { key: "train.freeze", reads: PARTS, check: something_is_trained },
];

pub(super) const UNUSED: &[Unused] = &[Unused {
    key: "train.freeze",
    reads: &["train.only", "train.freeze"],
    because: |config| {
        let beside = config.only() == TrainedPart::Experts && !config.train.freeze.contains(&Role::Experts);
        beside.then_some("train.only = \"experts\" freezes everything else as it is")
    },
}];

impl Config {
    /// What is trained.
    pub fn only(&self) -> TrainedPart {
        let implied = if self.lora.is_some() { TrainedPart::Lora } else { TrainedPart::All };
        self.train.only.unwrap_or(implied)
    }

    /// The roles of the model's weights that are not trained, in the order of [`Role::ALL`]. Adapters are
    /// trained whatever they are of.
    pub fn frozen(&self) -> Vec<Role> {
        let is_left_out = |role: Role| match self.only() {
            TrainedPart::All => false,
            TrainedPart::Experts => role != Role::Experts,
            TrainedPart::Lora => true,
        };
        self.roles().into_iter().filter(|role| is_left_out(*role) || self.train.freeze.contains(role)).collect()
    }

    /// Whether gradients reach the experts, and the routers.
    pub fn trains_experts_and_routers(&self) -> [bool; 2] {
        let frozen = self.frozen();
        [Role::Experts, Role::Router].map(|role| self.moe.is_some() && !frozen.contains(&role))
    }

    /// Whether nothing but experts is trained.
    pub(super) fn trains_experts_alone(&self) -> bool {
        let trains_experts = self.trains_experts_and_routers()[0];
        trains_experts && self.frozen().len() + 1 == self.roles().len()
    }

    /// The roles of which the model has weights.
    fn roles(&self) -> Vec<Role> {
        Role::ALL.into_iter().filter(|role| self.model.lacks(*role, self.moe.as_ref()).is_none()).collect()
    }
}

fn there_are_experts(config: &Config) -> Option<Finding> {
    if config.only() != TrainedPart::Experts {
        return None;
    }
    let because = config.model.lacks(Role::Experts, config.moe.as_ref())?;
    conflict(format!("there are no experts, {because}"), "set it to \"all\", or begin with a model that has experts")
}

fn frozen_parts_exist(config: &Config) -> Option<Finding> {
    // Where experts alone are trained, it is train.only that wants some.
    if config.only() != TrainedPart::All {
        return None;
    }
    let lacks = |role: &Role| Some((*role, config.model.lacks(*role, config.moe.as_ref())?));
    let (role, because) = config.train.freeze.iter().find_map(lacks)?;
    let wrong = format!("the model has no weights of {:?}: {because}", role.name());
    let names: Vec<String> = config.roles().into_iter().map(|role| format!("{:?}", role.name())).collect();
    conflict(wrong, format!("leave it out; this model has {}", names.join(", ")))
}

fn something_is_trained(config: &Config) -> Option<Finding> {
    let adapts = config.only() == TrainedPart::Lora;
    if adapts || config.frozen().len() < config.roles().len() || there_are_experts(config).is_some() {
        return None;
    }
    let all = config.only() == TrainedPart::All;
    let wrong = if all { "every part of the model is named" } else { "train.only = \"experts\" trains nothing else" };
    conflict(format!("nothing is left to train: {wrong}"), "leave a part out")
}
