//! Experts choose tokens (Zhou et al. 2022): load is even by construction. A token's fate depends on later tokens, so
//! causal models cannot use it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::choose::by_score;
use super::{Causality, Gate, GateKeys, Scope, Tokens};
use crate::moe::{Dialect, LayerConfig, Routing, Weighting, capacity};

/// `moe.gate = "expert_choice"`: without keys of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertChoiceKeys {}

impl GateKeys for ExpertChoiceKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        let factor = moe.capacity_factor.unwrap_or(1.0);
        let eval_factor = moe.eval_capacity_factor.unwrap_or(factor);
        Arc::new(ExpertChoice { k: moe.top_k, experts: moe.experts, factor, eval_factor })
    }
}

#[derive(Clone, Copy, Debug)]
pub struct ExpertChoice {
    /// Experts a token gets on average, at a factor of 1.
    pub k: usize,
    pub experts: usize,
    pub factor: f64,
    /// The factor outside training.
    pub eval_factor: f64,
}

impl Gate for ExpertChoice {
    /// Slot e of a token is expert e, if e took it.
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        let (count, experts) = (tokens.len(), tokens.experts);
        let probabilities: Vec<f32> = (0..count).flat_map(|t| softmax(tokens.row(t))).collect();
        let present: Vec<usize> = (0..count).filter(|&t| tokens.is_present(t)).collect();
        let factor = if tokens.draws.trains { self.factor } else { self.eval_factor };
        let take = capacity::share(factor, present.len() * self.k, experts).min(present.len());
        let mut chosen = vec![Routing::DROPPED; count * experts];
        for e in 0..experts {
            for t in by_score(present.clone(), |t| probabilities[t * experts + e]).into_iter().take(take) {
                chosen[t * experts + e] = e as u32;
            }
        }
        chosen
    }

    fn slots(&self) -> usize {
        self.experts
    }

    /// A slot that its expert left empty was never asked for.
    fn asked(&self, _tokens: usize, made: usize) -> usize {
        made
    }

    fn weighting(&self) -> Weighting {
        Weighting::Probability
    }

    fn is_even(&self) -> bool {
        true
    }

    fn chosen_per_token(&self) -> Option<f64> {
        Some(self.k as f64 * self.factor)
    }

    fn causality(&self) -> Causality {
        Causality::Broken("every choice compares a token with all others of its group, the later ones included")
    }

    fn heeds(&self, _dialect: Dialect) -> bool {
        false
    }

    fn scope(&self) -> Scope {
        Scope::Scores
    }

    fn skips_padding(&self) -> bool {
        true
    }
}

/// Computed in f64 and rounded once: probabilities that are equal in truth tie, whatever the order of their sums.
fn softmax(row: &[f32]) -> Vec<f32> {
    let top = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let powers: Vec<f64> = row.iter().map(|&l| (f64::from(l) - top).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|p| (p / sum) as f32).collect()
}
