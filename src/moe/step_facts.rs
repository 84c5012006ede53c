//! What is the same for all layers and micro-batches of a step.

use std::sync::Arc;

use super::gates::GateDraws;
use super::{LossTrend, Routings};

/// What is the same for all layers and micro-batches of a step.
#[derive(Clone, Debug)]
pub struct StepFacts {
    pub seed: u64,
    /// Optimizer step.
    pub step: u64,
    /// Whether dropout and the noise of gates are applied.
    pub trains: bool,
    /// Whether experts take all that come to them, whatever their capacity.
    pub unlimited: bool,
    /// The losses before this step, if thresholds follow them.
    pub trend: Option<LossTrend>,
    /// Where routings come from if not from the gates, and where they are recorded.
    pub routings: Arc<Routings>,
}

impl StepFacts {
    /// For inference: no dropout, and every gate in its deterministic form.
    pub fn of_inference() -> StepFacts {
        StepFacts { trains: false, ..StepFacts::of_training(0, 0) }
    }

    /// For a training step in which the gates decide and nothing is recorded.
    pub fn of_training(seed: u64, step: u64) -> StepFacts {
        StepFacts { seed, step, trains: true, unlimited: false, trend: None, routings: Arc::new(Routings::NONE) }
    }

    pub(super) fn draws(&self, layer: u32) -> GateDraws {
        GateDraws { seed: self.seed, step: self.step, layer, trains: self.trains }
    }
}
