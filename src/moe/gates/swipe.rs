//! SWIPE: choices are moved until every worker has its share (FastMoE's swipe gate).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::choose::top_k_of_each;
use super::{Causality, Gate, GateKeys, Scope, Tokens};
use crate::limits::{Bounds, Finding, SIZE_MAX, whole};
use crate::moe::{Config, LayerConfig, Routing, Weighting};

/// `moe.gate = { kind = "swipe", workers = 4 }`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SwipeKeys {
    /// Logical workers, independent of the ranks there are; they divide the experts.
    pub workers: usize,
}

impl Default for SwipeKeys {
    fn default() -> Self {
        SwipeKeys { workers: 1 }
    }
}

impl GateKeys for SwipeKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        Arc::new(Swipe { k: moe.top_k, workers: self.workers, weighting: moe.weighting(Weighting::AmongChosen) })
    }

    fn bounds(&self) -> &'static [(&'static str, Bounds)] {
        const COUNT: Bounds = whole(1, SIZE_MAX);
        &[("workers", COUNT)]
    }

    fn misfits(&self, moe: &Config) -> Vec<(&'static str, Finding)> {
        moe.equal_shares("workers", self.workers).map(|finding| ("workers", finding)).into_iter().collect()
    }

    fn idle(&self, _moe: &Config) -> Option<&'static str> {
        (self.workers == 1).then_some(
            "moe.gate.workers is 1, and one worker has nobody to share with; set it to 2 or more, a divisor of \
             moe.experts",
        )
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Swipe {
    pub k: usize,
    /// Logical workers: each has an equal, consecutive share of the experts and of a group's tokens.
    pub workers: usize,
    pub weighting: Weighting,
}

impl Gate for Swipe {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        top_k_of_each(tokens, self.k)
    }

    fn arrange(&self, chosen: &mut [u32], group: &Tokens) {
        if group.draws.trains {
            let mut free = vec![chosen.len().div_ceil(self.workers); self.workers];
            (0..self.k).for_each(|slot| self.balance(chosen, slot, &mut free, group.experts));
        }
    }

    fn slots(&self) -> usize {
        self.k
    }

    fn weighting(&self) -> Weighting {
        self.weighting
    }

    fn causality(&self) -> Causality {
        match self.workers {
            1 => Causality::Kept,
            _ => Causality::Bent(
                "in training the places of a worker are shared out among all tokens of a group; evaluation chooses \
                 token by token",
            ),
        }
    }

    fn scope(&self) -> Scope {
        Scope::Choices
    }
}

impl Swipe {
    /// Grants slot `slot` of every token in token order while its worker has places, then moves the rest.
    fn balance(&self, chosen: &mut [u32], slot: usize, free: &mut [usize], experts: usize) {
        let share = experts / self.workers;
        let mut moving = Vec::new();
        for (t, routes) in chosen.chunks_exact(self.k).enumerate() {
            let worker = routes[slot] as usize / share;
            // An earlier slot may have been moved to this very expert.
            if free[worker] > 0 && !routes[..slot].contains(&routes[slot]) {
                free[worker] -= 1;
            } else {
                moving.push(t);
            }
        }
        for t in moving {
            let routes = &mut chosen[t * self.k..][..self.k];
            routes[slot] = Routing::DROPPED;
            let Some(worker) = free.iter().position(|&places| places > 0) else { continue };
            let expert = |i: usize| (worker * share + (slot + i) % share) as u32;
            if let Some(expert) = (0..share).map(expert).find(|expert| !routes[..slot].contains(expert)) {
                routes[slot] = expert;
                free[worker] -= 1;
            }
        }
    }
}
