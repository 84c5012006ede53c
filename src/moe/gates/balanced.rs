//! Forced balance: tokens take experts in turn. For measurements, where skew must not be what is measured.

use super::{Gate, Tokens};
use crate::moe::Weighting;

#[derive(Clone, Copy, Debug)]
pub struct Balanced {
    pub k: usize,
    pub weighting: Weighting,
}

impl Gate for Balanced {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        let routes = tokens.first * self.k as u64..(tokens.first + tokens.len() as u64) * self.k as u64;
        routes.map(|route| (route % tokens.experts as u64) as u32).collect()
    }

    fn slots(&self) -> usize {
        self.k
    }

    fn weighting(&self) -> Weighting {
        self.weighting
    }
}
