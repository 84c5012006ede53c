//! How long a step takes: a roofline for each part of the model, and latency plus bytes for each message.
//!
//! A product takes what its arithmetic takes or what its operands take to read, whichever is longer; all else takes what
//! its bytes do. Gradients that leave while backward goes on, and weights that come ahead of their use, cost only what they
//! take longer than what is computed meanwhile. All other messages are waited for. Optimizer state that is elsewhere comes
//! and goes while it is updated, and costs what that takes longer than the update.

use std::collections::BTreeMap;

use guildhall_tensor::{Dtype, Phase};
use serde::Serialize;

use super::books::{Part, When};
use super::devices::Machine;
use super::layout::Task;
use super::links::message;
use super::step::Cost;

/// Seconds of one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Seconds {
    /// By part of the model.
    pub parts: BTreeMap<&'static str, f64>,
    /// Waited for, by group.
    pub messages: BTreeMap<String, f64>,
    /// Of gradients behind backward and of weights ahead of their use, what sticks out.
    pub behind: f64,
    /// Of the ways of offloaded state, what sticks out of the update.
    pub moving: f64,
}

impl Seconds {
    pub fn total(&self) -> f64 {
        self.computing() + self.messages.values().sum::<f64>() + self.behind + self.moving
    }

    pub fn computing(&self) -> f64 {
        self.parts.values().sum()
    }
}

/// The time of a step that costs this, on rank 0.
pub fn seconds(task: &Task, cost: &Cost, machine: &Machine) -> Seconds {
    let rate = machine.efficiency * machine.flops[usize::from(task.sizes.dtype == Dtype::Bf16)];
    let (mut parts, mut forward, mut backward, mut update) = (BTreeMap::<_, f64>::new(), 0.0, 0.0, 0.0);
    for ((phase, part), work) in &cost.work {
        let arithmetic = 2.0 * work.multiply_adds as f64 / rate;
        let products = arithmetic.max(work.product_bytes as f64 / machine.bandwidth);
        let taken = products + work.other_bytes as f64 / machine.bandwidth;
        *parts.entry(Part::name(*part)).or_default() += taken;
        match phase {
            // What is made again is made between the gradients of backward.
            Phase::Recompute | Phase::Backward => backward += taken,
            Phase::Update => update += taken,
            Phase::Forward => forward += taken,
        }
    }
    let (mut messages, mut gradients, mut ahead) = (BTreeMap::<_, f64>::new(), 0.0, 0.0);
    for (&(axis, collective, when), traffic) in &cost.messages {
        let taken = message(&task.layout.mesh, axis, collective, traffic, machine);
        match when {
            When::Now => *messages.entry(task.layout.degrees.name(axis)).or_default() += taken,
            When::Behind => gradients += taken,
            When::Ahead => ahead += taken,
        }
    }
    // Shared gradients leave in every micro-batch, others in the last.
    let passes = if task.layout.zero >= 2 { 1.0 } else { task.micro_batches() as f64 };
    // Sums leave for the host after each journey over the links.
    let journeys = if task.layout.zero >= 2 { task.micro_batches() as f64 } else { 1.0 };
    gradients += journeys * cost.leaving_sums as f64 / machine.host;
    // Half of the weights' gathers are for forward.
    let behind = (ahead / 2.0 - forward).max(0.0) + (ahead / 2.0 + gradients - backward / passes).max(0.0);
    // One thread reads and writes in turn; sums it only reads, in f32.
    let ways = 2.0 * cost.offloaded as f64 - cost.offloaded_sums as f64;
    let moving = (ways / machine.host - update).max(0.0);
    Seconds { parts, messages, behind, moving }
}
