//! The `[memory]` section of a recipe: what is done to make a run fit.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Ways to trade time for memory. None changes a bit of any number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
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
