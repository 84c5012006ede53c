//! Experts by the token's number in the vocabulary (Roller et al. 2021): nothing is learned.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Gate, GateKeys, Tokens};
use crate::moe::{Dialect, LayerConfig, Weighting};

/// `moe.gate = "hash"`: without keys of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HashKeys {}

impl GateKeys for HashKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        Arc::new(Hash { k: moe.top_k })
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Hash {
    pub k: usize,
}

impl Gate for Hash {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        let experts = tokens.experts as u64;
        let mut chosen = Vec::with_capacity(tokens.ids.len() * self.k);
        for &id in tokens.ids {
            let start = chosen.len();
            for choice in 0..self.k {
                let mut expert = (hash(id, choice as u32) % experts) as u32;
                while chosen[start..].contains(&expert) {
                    expert = (expert + 1) % experts as u32;
                }
                chosen.push(expert);
            }
        }
        chosen
    }

    fn slots(&self) -> usize {
        self.k
    }

    fn weighting(&self) -> Weighting {
        Weighting::Even
    }

    fn heeds(&self, _dialect: Dialect) -> bool {
        false
    }
}

/// The finaliser of SplitMix64 (Steele et al. 2014) over a token's number and which choice it is.
pub(super) fn hash(id: u32, choice: u32) -> u64 {
    let mut z = (u64::from(choice) << 32 | u64::from(id)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
