//! What the keys of sequence migration (`parallel.migrate*`) may be together, and where they do nothing.

use super::Config;
use super::rules::{Rule, Unused, conflict};
use crate::limits::Finding;
use crate::parallel::{Exchange, Migrate};

const MIGRATE: &str = "parallel.migrate";

/// What the hosts of sequences hang on.
const READS: &[&str] = &[
    MIGRATE,
    "parallel.ranks",
    "parallel.tensor",
    "parallel.expert",
    "parallel.expert_tensor",
    "parallel.order",
    "parallel.exchange",
    "moe.layers",
];

pub(super) const RULES: &[Rule] = &[Rule { key: MIGRATE, reads: READS, check: whole_groups_decide }];

fn whole_groups_decide(config: &Config) -> Option<Finding> {
    let shapes = config.parallel.shapes();
    if config.parallel.migrate == Migrate::Off || config.moe.is_none() || !shapes.iter().all(|s| s.is_possible()) {
        return None;
    }
    let cut = shapes.iter().find(|shape| !(0..shape.ranks).all(|rank| shape.meets_hosts_only(rank)))?;
    let wrong = format!(
        "groups of parallel.expert = {} ranks cut through ranks that see the same tokens (parallel.tensor = {}), which \
         could not move them together",
        cut.expert, cut.tensor
    );
    conflict(wrong, "set it to \"off\", or parallel.expert to a multiple of parallel.tensor, or slice the experts")
}

fn is_off(config: &Config) -> Option<&'static str> {
    (config.parallel.migrate == Migrate::Off).then_some("parallel.migrate = \"off\" moves no sequence")
}

pub(super) const UNUSED: &[Unused] = &[
    Unused { key: "parallel.migrate_candidates", reads: &[MIGRATE], because: is_off },
    Unused { key: "parallel.migrate_slack", reads: &[MIGRATE], because: is_off },
];

pub(super) const IDLE: &[Unused] = &[Unused { key: MIGRATE, reads: READS, because: nowhere_to_go }];

fn nowhere_to_go(config: &Config) -> Option<&'static str> {
    if config.parallel.migrate == Migrate::Off || !config.parallel.shapes().iter().all(|shape| shape.is_possible()) {
        return None;
    }
    config.sequences_stay()
}

impl Config {
    /// Why no sequence moves to another rank, if none does.
    pub fn sequences_stay(&self) -> Option<&'static str> {
        if self.moe.is_none() {
            return Some("the recipe has no [moe] section");
        }
        if !self.parallel.has_hosts() {
            return Some(
                "no expert group has two groups of ranks that see different tokens, so that a sequence has nowhere to go",
            );
        }
        let all_visit = self.parallel.exchange == Exchange::Experts;
        (all_visit && self.parallel.migrate == Migrate::Auto).then_some(
            "parallel.exchange = \"experts\" computes all results where their sequences are, so that nothing can be saved",
        )
    }
}
