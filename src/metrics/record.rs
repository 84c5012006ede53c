//! One line of `metrics.jsonl`: what one optimizer step did, over all ranks.

use serde::{Deserialize, Serialize};

use super::float;

/// One optimizer step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Counted from 1; the number of optimizer steps done.
    pub step: u64,
    /// Mean cross-entropy of the step's valid tokens, nats.
    #[serde(with = "float")]
    pub loss: f64,
    /// Load-balancing loss before its weight, mean over MoE layers; 0 without any.
    #[serde(with = "float")]
    pub balance_loss: f64,
    /// Router z-loss before its weight, mean over MoE layers; 0 without any.
    #[serde(with = "float")]
    pub z_loss: f64,
    /// Global gradient norm before clipping.
    #[serde(with = "float")]
    pub grad_norm: f64,
    /// Learning rate of this step.
    #[serde(with = "float")]
    pub lr: f64,
    /// Valid tokens trained on since the run began.
    pub tokens: u64,
    /// Valid tokens of this step per wall-clock second, over all ranks.
    #[serde(with = "float")]
    pub tokens_per_s: f64,
    /// Wall-clock seconds since the run began, summed over resumes.
    #[serde(with = "float")]
    pub seconds: f64,
    /// Mean cross-entropy of the evaluation set, nats, at steps that evaluate.
    #[serde(default, with = "float::optional", skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    /// Experts whose weights visited other ranks, summed over layers, micro-batches and expert groups; absent if none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shadowed: u64,
    /// One entry per MoE layer; empty for a dense model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moe: Vec<MoeRecord>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// What one MoE layer's router did in one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeRecord {
    /// Index of the layer in the model, from 0.
    pub layer: usize,
    /// Routes per expert, over all ranks.
    pub load: Vec<u64>,
    /// Entropy of the load, from 0 (one expert does all) to 1 (uniform).
    #[serde(with = "float")]
    pub entropy: f64,
    /// Routes dropped for lack of capacity.
    pub dropped: u64,
}

impl MoeRecord {
    /// Derives the entropy from the load.
    pub fn new(layer: usize, load: Vec<u64>, dropped: u64) -> MoeRecord {
        let entropy = load_entropy(&load);
        MoeRecord { layer, load, entropy, dropped }
    }
}

/// Entropy of a load divided by ln E, so that uniform is 1; a single expert counts as uniform, no routes as 0.
pub fn load_entropy(load: &[u64]) -> f64 {
    let total: f64 = load.iter().map(|&routes| routes as f64).sum();
    if total == 0.0 {
        return 0.0;
    }
    if load.len() == 1 {
        return 1.0;
    }
    let shares = load.iter().filter(|&&routes| routes > 0).map(|&routes| routes as f64 / total);
    let nats: f64 = shares.map(|share| -share * share.ln()).sum();
    // Rounding may pass 1 by an ulp, and a share of 1 gives -0.
    (nats / (load.len() as f64).ln()).clamp(0.0, 1.0) + 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropy_runs_from_collapse_to_uniform() {
        let check = |load: &[u64], expected: f64| {
            let found = load_entropy(load);
            assert!((found - expected).abs() < 1e-12, "{load:?}: {found}, not {expected}");
        };
        check(&[5, 5, 5, 5], 1.0);
        check(&[20, 0, 0, 0], 0.0);
        check(&[7, 7, 0, 0], 0.5);
        check(&[3], 1.0);
        check(&[0, 0], 0.0);
        check(&[], 0.0);
    }
}
