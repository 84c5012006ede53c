//! Top 2 with the second choice given up at random when its weight is small (Lepikhin et al. 2020).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::choose::{sigmoid, top_k_of_each};
use super::{BalanceKind, Draw, Gate, GateKeys, Tokens};
use crate::moe::{LayerConfig, Routing, Weighting};

/// `moe.gate = "gshard"`: without keys of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GShardKeys {}

impl GateKeys for GShardKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        Arc::new(GShard { weighting: moe.weighting(Weighting::AmongChosen) })
    }

    fn only_top_k(&self) -> Option<usize> {
        Some(2)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct GShard {
    pub weighting: Weighting,
}

impl Gate for GShard {
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
}

/// In training, drops the second choice when `2 w_2 < u`, with w_2 its share in a softmax over the two.
pub(super) fn thin_second_choices(kept: &mut [u32], tokens: &Tokens) {
    if !tokens.draws.trains {
        return;
    }
    let draws = tokens.draws.of(Draw::SecondChoice);
    for (t, pair) in kept.chunks_exact_mut(2).enumerate() {
        let [first, second] = [0, 1].map(|j| f64::from(tokens.row(t)[pair[j] as usize]));
        if 2.0 * sigmoid(second - first) < draws.uniform(tokens.first + t as u64) {
            pair[1] = Routing::DROPPED;
        }
    }
}
