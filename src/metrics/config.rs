//! The `[metrics]` section of a recipe: what a run writes of its numbers besides `metrics.jsonl`.

use serde::{Deserialize, Serialize};

/// Further files with a run's numbers. None changes a bit of any number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// TensorBoard's event files, in the folder `tensorboard` of the run.
    #[serde(default)]
    pub tensorboard: bool,
}
