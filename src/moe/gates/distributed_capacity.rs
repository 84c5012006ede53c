//! GShard's gate with capacity counted per expert over all workers (FastMoE's distributed-capacity gate).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::choose::top_k_of_each;
use super::gshard::thin_second_choices;
use super::{BalanceKind, Gate, GateKeys, Tokens};
use crate::limits::{Bounds, Finding, SIZE_MAX, whole};
use crate::moe::{Config, LayerConfig, Weighting, capacity};

/// `moe.gate = { kind = "distributed_capacity", workers = 4 }`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DistributedCapacityKeys {
    /// Logical workers, independent of the ranks there are; they divide the experts.
    pub workers: usize,
}

impl Default for DistributedCapacityKeys {
    fn default() -> Self {
        DistributedCapacityKeys { workers: 1 }
    }
}

impl GateKeys for DistributedCapacityKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        Arc::new(DistributedCapacity { workers: self.workers, weighting: moe.weighting(Weighting::AmongChosen) })
    }

    fn bounds(&self) -> &'static [(&'static str, Bounds)] {
        const COUNT: Bounds = whole(1, SIZE_MAX);
        &[("workers", COUNT)]
    }

    fn only_top_k(&self) -> Option<usize> {
        Some(2)
    }

    fn misfits(&self, moe: &Config) -> Vec<(&'static str, Finding)> {
        moe.equal_shares("workers", self.workers).map(|finding| ("workers", finding)).into_iter().collect()
    }

    fn idle(&self, moe: &Config) -> Option<&'static str> {
        if moe.capacity_factor.is_none() {
            return Some("without moe.capacity_factor there are no places to distribute; set it, for example to 1.25");
        }
        (self.workers == 1).then_some(
            "moe.gate.workers is 1, so that each expert has places for all tokens of a group; set it to 2 or more, a \
             divisor of moe.experts",
        )
    }
}

#[derive(Clone, Copy, Debug)]
pub struct DistributedCapacity {
    pub workers: usize,
    pub weighting: Weighting,
}

impl Gate for DistributedCapacity {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        top_k_of_each(tokens, 2)
    }

    fn slots(&self) -> usize {
        2
    }

    fn weighting(&self) -> Weighting {
        self.weighting
    }

    fn thin(&self, kept: &mut [u32], tokens: &Tokens) {
        thin_second_choices(kept, tokens);
    }

    fn balance(&self) -> BalanceKind {
        BalanceKind::FirstChoices
    }

    fn capacity(&self, factor: f64, tokens: usize, _experts: usize) -> usize {
        capacity::share(factor, tokens, self.workers)
    }
}
