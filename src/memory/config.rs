//! The `[memory]` section of a recipe: what is done to make a run fit.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Ways to trade time for memory. None changes a bit of any number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// What of a forward runs again in backward.
    #[serde(default)]
    pub recompute: Recompute,
    /// For `recompute = "operations"`; absent means all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompute_operations: Option<Vec<Operation>>,
    /// Blocks that run again take what came from other ranks from their first run.
    #[serde(default = "default_keep_communication")]
    pub keep_communication: bool,
    /// Most elements of a weight that the optimizer updates at once; absent means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tile: Option<usize>,
    /// Where the optimizer's state is between updates.
    #[serde(default)]
    pub offload: Offload,
    /// Where the files of `offload = "file"` are; absent means `offload` in `run.dir`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload_dir: Option<PathBuf>,
}

/// What of a forward runs again in backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    #[default]
    None,
    /// Every block: between steps of backward, of each only its input is there.
    Block,
    /// Some operations, which are cheap for what they would keep.
    Operations,
}

/// An operation that may run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// Attention itself, from queries, keys and values.
    Attention,
    /// What is between the two products of a feed-forward.
    Activations,
    /// Experts, from the rows that arrived.
    Experts,
}

/// Where the optimizer's state is between updates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// On the device.
    #[default]
    None,
    /// In memory of the host, which the device's account does not count.
    Host,
    /// In a file a rank.
    File,
}

impl Operation {
    pub const ALL: [Operation; 3] = [Operation::Attention, Operation::Activations, Operation::Experts];

    /// The name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Attention => "attention",
            Operation::Activations => "activations",
            Operation::Experts => "experts",
        }
    }
}

fn default_keep_communication() -> bool {
    true
}
