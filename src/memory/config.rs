//! The `[memory]` section of a recipe: what is done to make a run fit.

use std::fmt;
use std::path::PathBuf;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize};

/// How much memory there is, and ways to trade time for it. None changes a bit of any number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Most bytes that a rank's account may come to; absent means an equal share of what the machine has free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// What of a forward runs again in backward.
    #[serde(default)]
    pub recompute: RecomputeMode,
    /// For `recompute = "operations"`; absent means all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompute_operations: Option<Vec<RecomputedOp>>,
    /// Blocks that run again take what came from other ranks from their first run.
    #[serde(default = "default_keep_communication")]
    pub keep_communication: bool,
    /// Most elements of a weight that the optimizer updates at once; absent means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tile: Option<usize>,
    /// Where the optimizer's state is between updates, and the sums of gradients are before them.
    #[serde(default)]
    pub offload: Offload,
    /// Where the files of `offload = "file"` are; absent means `offload` in `run.dir`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload_dir: Option<PathBuf>,
}

/// An amount of memory, as it is written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Budget {
    Bytes(u64),
    /// A number and a unit, such as `512 MiB`.
    Text(String),
}

impl Budget {
    /// `None` where the text is no amount.
    pub fn bytes(&self) -> Option<u64> {
        let text = match self {
            Budget::Bytes(bytes) => return Some(*bytes),
            Budget::Text(text) => text.trim(),
        };
        let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
        let factor = match unit {
            "" | "B" => 1.0,
            "kB" | "KB" => 1e3,
            "MB" => 1e6,
            "GB" => 1e9,
            "TB" => 1e12,
            "KiB" => 1024.0,
            "MiB" => 1024f64.powi(2),
            "GiB" => 1024f64.powi(3),
            "TiB" => 1024f64.powi(4),
            _ => return None,
        };
        let bytes = number.trim().parse::<f64>().ok()? * factor;
        (bytes.is_finite() && bytes >= 1.0).then_some(bytes as u64)
    }
}

/// By hand, because the derived form would not say which forms there are.
impl<'de> Deserialize<'de> for Budget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Budget, D::Error> {
        struct Amount;
        impl Visitor<'_> for Amount {
            type Value = Budget;

            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("a number of bytes, or text such as \"512 MiB\"")
            }

            fn visit_u64<E>(self, bytes: u64) -> Result<Budget, E> {
                Ok(Budget::Bytes(bytes))
            }

            fn visit_i64<E>(self, bytes: i64) -> Result<Budget, E> {
                // What is below zero is found wrong as text is.
                Ok(u64::try_from(bytes).map_or_else(|_| Budget::Text(bytes.to_string()), Budget::Bytes))
            }

            fn visit_str<E>(self, text: &str) -> Result<Budget, E> {
                Ok(Budget::Text(text.to_owned()))
            }
        }
        deserializer.deserialize_any(Amount)
    }
}

/// What of a forward runs again in backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeMode {
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
pub enum RecomputedOp {
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

impl Config {
    /// Bytes of `budget`, if one is given: configuration has been checked before.
    pub fn budget_bytes(&self) -> Option<u64> {
        self.budget.as_ref().and_then(Budget::bytes)
    }
}

impl RecomputedOp {
    pub const ALL: [RecomputedOp; 3] = [RecomputedOp::Attention, RecomputedOp::Activations, RecomputedOp::Experts];

    /// The name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            RecomputedOp::Attention => "attention",
            RecomputedOp::Activations => "activations",
            RecomputedOp::Experts => "experts",
        }
    }
}

fn default_keep_communication() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_units() {
        let bytes = |text: &str| Budget::Text(text.to_owned()).bytes();
        for (text, expected) in [("512 MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("4096", 4096), ("2 KiB", 2048)] {
            assert_eq!(bytes(text), Some(expected), "{text}");
        }
        for text in ["", "MiB", "12 apples", "-3 GB", "0", "1e400 B", "4 mb"] {
            assert_eq!(bytes(text), None, "{text}");
        }
        assert_eq!(Budget::Bytes(7).bytes(), Some(7));
    }
}
