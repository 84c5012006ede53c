//! Top 1 with multiplicative jitter on the router's input (Fedus et al. 2021).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::choose::top_k_of_each;
use super::{BalanceKind, Gate, GateKeys, Perturbation, Tokens};
use crate::moe::{LayerConfig, Weighting};

/// How far the jitter goes to either side of 1.
const JITTER: f32 = 0.1;

/// `moe.gate = "switch"`: without keys of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchKeys {}

impl GateKeys for SwitchKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        Arc::new(Switch { weighting: moe.weighting(Weighting::Probability) })
    }

    fn only_top_k(&self) -> Option<usize> {
        Some(1)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Switch {
    pub weighting: Weighting,
}

impl Gate for Switch {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        top_k_of_each(tokens, 1)
    }

    fn goes_by_largest(&self) -> bool {
        true
    }

    fn slots(&self) -> usize {
        1
    }

    fn weighting(&self) -> Weighting {
        self.weighting
    }

    fn perturbation(&self) -> Perturbation {
        Perturbation::Jitter(JITTER)
    }

    fn balance(&self) -> BalanceKind {
        BalanceKind::FirstChoices
    }
}
