//! Forced balance: tokens take experts in turn. For measurements, where skew must not be what is measured.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Gate, GateKeys, Tokens};
use crate::moe::{LayerConfig, Weighting};

/// `moe.gate = "balanced"`: without keys of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalancedKeys {}

impl GateKeys for BalancedKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        Arc::new(Balanced { k: moe.top_k, weighting: moe.weighting(Weighting::Probability) })
    }
}

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

    fn is_even(&self) -> bool {
        true
    }
}
