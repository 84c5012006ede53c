//! The k most probable experts (Mixtral; megatron's and DeepSeek-V2's dialects of weighing them).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::choose::top_k_of_each;
use super::{Gate, GateKeys, Tokens};
use crate::moe::{LayerConfig, Weighting};

/// `moe.gate = "softmax"`: without keys of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SoftmaxKeys {}

impl GateKeys for SoftmaxKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        Arc::new(Softmax { k: moe.top_k, weighting: moe.weighting(Weighting::Normalised) })
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Softmax {
    pub k: usize,
    pub weighting: Weighting,
}

impl Gate for Softmax {
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
