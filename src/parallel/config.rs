//! The `[parallel]` section of a recipe: how many ranks and how experts are spread over them.

use serde::{Deserialize, Serialize};

/// The mesh, and how long ranks wait for each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Ranks (threads) of the run; all are data parallel for everything but the experts.
    #[serde(default = "one")]
    pub ranks: usize,
    /// Ranks one set of experts is spread over; divides `ranks` and `moe.experts`.
    #[serde(default = "one")]
    pub expert: usize,
    /// The rank of an expert group that holds each expert; absent means equal, consecutive shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_table: Option<Vec<usize>>,
    /// Compute threads per rank; absent means cores divided by ranks.
    #[serde(default)]
    pub threads: Option<usize>,
    /// Seconds a rank waits in a collective before it reports who is missing.
    #[serde(default = "default_timeout_s")]
    pub timeout_s: u64,
}

impl Config {
    /// A mesh, and defaults for all else.
    pub fn of(ranks: usize, expert: usize) -> Config {
        Config { ranks, expert, expert_table: None, threads: None, timeout_s: default_timeout_s() }
    }
}

fn one() -> usize {
    1
}

fn default_timeout_s() -> u64 {
    300
}
