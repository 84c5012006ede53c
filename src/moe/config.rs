//! The `[moe]` section of a recipe: how many experts, who chooses them, how they are kept busy.

use serde::{Deserialize, Serialize};

/// Sizes and losses of the MoE layers. Without the section every layer is dense.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Experts per MoE layer, over all ranks.
    pub experts: usize,
    /// Experts each token is sent to.
    #[serde(default = "default_top_k")]
    pub top_k: usize,
    /// Inner width of one expert; absent means `model.d_ff`.
    #[serde(default)]
    pub d_expert: Option<usize>,
    /// Which layers are MoE.
    #[serde(default = "default_layers")]
    pub layers: Layers,
    /// Weight of the load-balancing loss (per sequence; 1.0 when perfectly balanced).
    #[serde(default = "default_balance_weight")]
    pub balance_weight: f32,
    /// Weight of the router z-loss.
    #[serde(default)]
    pub z_weight: f32,
}

/// `"all"`, `{ every = 2 }` (the 2nd, 4th, ... layer) or `{ list = [1, 3] }` (layers counted from 0).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layers {
    All,
    Every(usize),
    List(Vec<usize>),
}

impl Layers {
    /// Whether layer `index` (from 0) is MoE.
    pub fn contains(&self, index: usize) -> bool {
        match self {
            Layers::All => true,
            Layers::Every(n) => (index + 1).is_multiple_of(*n),
            Layers::List(list) => list.contains(&index),
        }
    }
}

fn default_top_k() -> usize {
    2
}

fn default_layers() -> Layers {
    Layers::All
}

fn default_balance_weight() -> f32 {
    0.01
}
