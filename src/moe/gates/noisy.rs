//! Noisy top-k (Shazeer et al. 2017): normal noise of learned size on the logits, so that load has a gradient.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::choose::top_k_of_each;
use super::{BalanceKind, Gate, GateKeys, Perturbation, Tokens};
use crate::moe::{LayerConfig, Weighting};

/// `moe.gate = "noisy"`: without keys of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoisyKeys {}

impl GateKeys for NoisyKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        Arc::new(Noisy { k: moe.top_k, weighting: moe.weighting(Weighting::AmongChosen) })
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Noisy {
    pub k: usize,
    pub weighting: Weighting,
}

impl Gate for Noisy {
    /// The logits shown have their noise already.
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        top_k_of_each(tokens, self.k)
    }

    fn goes_by_largest(&self) -> bool {
        true
    }

    fn slots(&self) -> usize {
        self.k
    }

    fn weighting(&self) -> Weighting {
        self.weighting
    }

    fn perturbation(&self) -> Perturbation {
        Perturbation::Noise
    }

    fn balance(&self) -> BalanceKind {
        BalanceKind::ImportanceAndLoad
    }
}
