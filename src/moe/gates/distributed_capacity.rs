//! GShard's gate with capacity counted per expert over all workers (FastMoE's distributed-capacity gate).

use super::choose::top_k_of_each;
use super::gshard::thin_second_choices;
use super::{BalanceKind, Gate, Tokens};
use crate::moe::{Weighting, capacity};

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
