//! Sigmoid scores, chosen with a balancing bias and within the best groups of experts (DeepSeek-V3).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::choose::{sigmoid, top_k};
use super::{Gate, GateKeys, Tokens};
use crate::limits::{Bounds, Finding, SIZE_MAX, above_zero, from_zero, nearest_of, whole};
use crate::moe::{Config, Dialect, LayerConfig, Weighting};

/// `moe.gate = { kind = "sigmoid", groups = 4, top_groups = 2, route_scale = 2.5, bias_rate = 1e-3 }`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SigmoidKeys {
    /// Equal, consecutive groups of experts; 1 means no grouping.
    pub groups: usize,
    /// Groups whose experts a token may choose.
    pub top_groups: usize,
    /// Factor on the weights.
    pub route_scale: f32,
    /// Whether sigmoids of the chosen experts are divided by their sum.
    pub normalised: bool,
    /// Step of the balancing bias; 0 keeps it at zero.
    pub bias_rate: f32,
}

impl Default for SigmoidKeys {
    fn default() -> Self {
        SigmoidKeys { groups: 1, top_groups: 1, route_scale: 1.0, normalised: true, bias_rate: 0.0 }
    }
}

impl GateKeys for SigmoidKeys {
    fn gate(&self, moe: &LayerConfig) -> Arc<dyn Gate> {
        let group_score = match moe.dialect {
            Some(Dialect::Megatron) => (moe.top_k / self.top_groups).max(1),
            _ => 2,
        };
        let SigmoidKeys { groups, top_groups, route_scale: scale, normalised, bias_rate: rate } = *self;
        Arc::new(Sigmoid { k: moe.top_k, groups, top_groups, group_score, scale, normalised, rate })
    }

    fn bounds(&self) -> &'static [(&'static str, Bounds)] {
        const SCALE: Bounds = above_zero(1.0);
        const RATE: Bounds = from_zero(0.001);
        const COUNT: Bounds = whole(1, SIZE_MAX);
        const NORMALISED: Bounds = Bounds::Truth;
        &[
            ("groups", COUNT),
            ("top_groups", COUNT),
            ("route_scale", SCALE),
            ("normalised", NORMALISED),
            ("bias_rate", RATE),
        ]
    }

    fn misfits(&self, moe: &Config) -> Vec<(&'static str, Finding)> {
        let uneven = moe.equal_shares("groups", self.groups).map(|finding| ("groups", finding));
        uneven.into_iter().chain(self.too_few(moe).map(|finding| ("top_groups", finding))).collect()
    }
}

impl SigmoidKeys {
    /// Whether the groups that a token may choose from hold its choices.
    fn too_few(&self, moe: &Config) -> Option<Finding> {
        let size = moe.experts.smallest() / self.groups;
        let least = moe.top_k.div_ceil(size.max(1)).min(self.groups);
        // Megatron scores a group by k / top_groups of its experts.
        let shared = moe.dialect == Some(Dialect::Megatron) && self.groups > 1;
        let valid: Vec<usize> = (least..=self.groups).filter(|n| !shared || moe.top_k.is_multiple_of(*n)).collect();
        if valid.contains(&self.top_groups) {
            return None;
        }
        let mut wrong =
            format!("of {} groups of {size} experts, from which moe.top_k = {} are chosen", self.groups, moe.top_k);
        if shared {
            wrong += ", as many in each with moe.dialect = \"megatron\"";
        }
        if valid.is_empty() {
            return Some(Finding::new(wrong, "leave moe.dialect out, or change moe.top_k or moe.gate.groups"));
        }
        Some(Finding::new(wrong, nearest_of(self.top_groups, &valid)))
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Sigmoid {
    pub k: usize,
    /// Equal, consecutive groups of experts; 1 means no grouping.
    pub groups: usize,
    /// Groups whose experts a token may choose.
    pub top_groups: usize,
    /// How many of a group's best scores make the group's.
    pub group_score: usize,
    /// Factor on the weights.
    pub scale: f32,
    /// Whether weights are divided by their sum.
    pub normalised: bool,
    /// Step of the balancing bias.
    pub rate: f32,
}

impl Sigmoid {
    fn choose_one(&self, scores: &[f32]) -> Vec<u32> {
        if self.groups == 1 {
            return top_k(scores, self.k, |_| true);
        }
        let size = scores.len() / self.groups;
        let of_group = |group: &[f32]| -> f32 {
            top_k(group, self.group_score.min(size), |_| true).iter().map(|&e| group[e as usize]).sum()
        };
        let groups: Vec<f32> = scores.chunks_exact(size).map(of_group).collect();
        let best = top_k(&groups, self.top_groups, |_| true);
        top_k(scores, self.k, |e| best.contains(&((e / size) as u32)))
    }
}

impl Gate for Sigmoid {
    fn choose(&self, tokens: &Tokens) -> Vec<u32> {
        let score = |(l, b): (&f32, &f32)| sigmoid(f64::from(*l)) + b;
        let of_token = |t| {
            let scores: Vec<f32> = tokens.row(t).iter().zip(tokens.bias).map(score).collect();
            self.choose_one(&scores)
        };
        (0..tokens.len()).flat_map(of_token).collect()
    }

    fn slots(&self) -> usize {
        self.k
    }

    fn weighting(&self) -> Weighting {
        Weighting::Sigmoid { scale: self.scale, normalised: self.normalised }
    }

    fn bias_rate(&self) -> Option<f32> {
        Some(self.rate)
    }

    /// Megatron Core and DeepSeek have losses of their own for sigmoid scores; the weights are the same.
    fn heeds(&self, dialect: Dialect) -> bool {
        matches!(dialect, Dialect::Megatron | Dialect::Deepseek)
    }
}
