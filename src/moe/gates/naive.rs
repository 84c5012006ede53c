//! The k largest logits, weighed by a softmax among themselves (FastMoE's naive gate).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::choose::top_k_of_each;
use super::{Gate, GateKeys, Tokens};
use crate::moe::{LayerConfig, Weighting};

/// `moe.gate = "naive"`: without keys of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NaiveKeys {}

impl GateKeys for NaiveKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        Arc::new(Naive { k: moe.top_k, weighting: moe.weighting(Weighting::AmongChosen) })
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Naive {
    pub k: usize,
    pub weighting: Weighting,
}

impl Gate for Naive {
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
}
