//! How long a step takes: a roofline for each part of the model, and latency plus bytes for each message.
//!
//! A product takes what its arithmetic takes or what its operands take to read, whichever is longer; all else takes what
//! its bytes do. Gradients that leave while backward goes on, and weights that come ahead of their use, cost only what they
//! take longer than what is computed meanwhile. All other messages are waited for. Optimizer state that is elsewhere comes
//! and goes while it is updated, and costs what that takes longer than the update.

use std::collections::BTreeMap;

use guildhall_comm::wrap::NodeWay;
use guildhall_tensor::{Dtype, Phase};
use serde::Serialize;

use super::books::{ModelPart, When};
use super::devices::Machine;
use super::layout::{Layout, Load, Task};
use super::links::message;
use super::step::{StepCost, step};

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

impl Task {
    /// The way from node to node with which a step takes least, of equal ones the most direct.
    pub fn fastest_way(&self, machine: &Machine) -> NodeWay {
        let time = |way: NodeWay| {
            let task = Task { layout: Layout { way, ..self.layout.clone() }, ..self.clone() };
            // Of the ranks of a node some hand on more than others.
            let mates = (0..task.layout.mesh.ranks).filter(|&rank| task.layout.nodes.of(rank) == 0);
            let even = Load::Even { imbalance: 1.0 };
            let of_rank = |rank: usize| seconds(&task, &step(&task, rank, &even), machine).total();
            mates.map(of_rank).fold(0.0, f64::max)
        };
        let timed = NodeWay::ALL.map(|way| (way, time(way)));
        timed.into_iter().min_by(|a, b| a.1.total_cmp(&b.1)).expect("there are ways").0
    }
}

/// The time of a step that costs this, on rank 0.
pub fn seconds(task: &Task, cost: &StepCost, machine: &Machine) -> Seconds {
    let rate = machine.efficiency * machine.flops[usize::from(task.sizes.dtype == Dtype::Bf16)];
    let (mut parts, mut forward, mut backward, mut update) = (BTreeMap::<_, f64>::new(), 0.0, 0.0, 0.0);
    for ((phase, part), work) in &cost.work {
        let arithmetic = 2.0 * work.multiply_adds as f64 / rate;
        let products = arithmetic.max(work.product_bytes as f64 / machine.bandwidth);
        let taken = products + work.other_bytes as f64 / machine.bandwidth;
        *parts.entry(ModelPart::name(*part)).or_default() += taken;
        match phase {
            // What is made again is made between the gradients of backward.
            Phase::Recompute | Phase::Backward => backward += taken,
            Phase::Update => update += taken,
            Phase::Forward => forward += taken,
        }
    }
    let (mut messages, mut gradients, mut ahead) = (BTreeMap::<_, f64>::new(), 0.0, 0.0);
    for (&(axis, collective, when), traffic) in &cost.messages {
        let taken = message(&task.layout, axis, collective, traffic, machine);
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

#[cfg(test)]
mod tests {
    use guildhall_comm::Collective;
    use guildhall_tensor::Work;

    use super::super::books::{Bytes, PlannedTraffic};
    use super::super::devices::LinkSpeed;
    use super::super::recipe;
    use super::*;
    use crate::parallel::Axis;

    fn task(set: &[&str]) -> Task {
        recipe::task("quickstart.toml", set)
    }

    /// Every number a power of two, so that sums are exact; all ranks on one node.
    fn machine() -> Machine {
        let known = Machine::known("h100").expect("known");
        let wire = LinkSpeed { latency_s: 0.0, message_s: 0.0, bandwidth: 4.0 };
        Machine { flops: [4.0, 8.0], efficiency: 0.5, bandwidth: 16.0, within: wire, host: 2.0, ..known }
    }

    fn cost() -> StepCost {
        let work = |multiply_adds, product_bytes, other_bytes| Work { multiply_adds, product_bytes, other_bytes };
        let sent = |bytes| PlannedTraffic { calls: 1, messages: 1, bytes };
        StepCost {
            at_peak: Bytes::default(),
            peaks: Bytes::default(),
            offloaded: 0,
            offloaded_sums: 0,
            leaving_sums: 0,
            update: 0,
            messages: [
                ((Axis::Data, Collective::AllReduce, When::Now), sent(4)),
                ((Axis::Data, Collective::ReduceScatter, When::Behind), sent(256)),
                ((Axis::Data, Collective::AllGather, When::Ahead), sent(64)),
            ]
            .into(),
            work: [
                // Two operations each at two a second; at sixteen bytes a second.
                ((Phase::Forward, ModelPart::Attention), work(4, 16, 32)),
                // Longer to read than to multiply.
                ((Phase::Backward, ModelPart::Attention), work(8, 256, 0)),
                ((Phase::Recompute, ModelPart::Attention), work(0, 0, 64)),
                ((Phase::Backward, ModelPart::Head), work(12, 0, 0)),
                ((Phase::Update, ModelPart::Optimizer), work(0, 0, 80)),
            ]
            .into(),
            elements: 0,
        }
    }

    /// Forward takes 6 s, backward with what is made again 32 s, the update 5 s.
    #[test]
    fn what_computes_meanwhile_hides_what_travels() {
        let of = |set: &[&str], cost: &StepCost| {
            seconds(&task(&[&["parallel.ranks=2", "parallel.expert=2"], set].concat()), cost, &machine())
        };
        let one = of(&[], &cost());
        assert_eq!(one.parts, [("attention", 26.0), ("head", 12.0), ("optimizer", 5.0)].into());
        assert_eq!(one.messages, [("data".to_owned(), 1.0)].into());
        // Weights come for 16 s: 8 in forward, of which 2 stick out; in backward 8 beside gradients' 64, 40 of which do.
        assert_eq!((one.behind, one.moving), (2.0 + 40.0, 0.0));
        assert_eq!(one.total(), 43.0 + 1.0 + 42.0);
        // Of four micro-batches the last one's backward alone hides whole gradients, all of them shared ones.
        let micro = "train.micro_batch=4";
        let batches = task(&[micro]).micro_batches() as f64;
        assert!(batches > 1.0);
        assert_eq!(of(&[micro], &cost()).behind, 2.0 + 72.0 - 32.0 / batches);
        assert_eq!(of(&[micro, "parallel.zero=1"], &cost()).behind, 2.0 + 72.0 - 32.0 / batches);
        assert_eq!(of(&[micro, "parallel.zero=2"], &cost()).behind, 42.0);
        // Sums go to the host once, or after every micro-batch.
        let away = StepCost { offloaded: 24, offloaded_sums: 8, leaving_sums: 4, ..cost() };
        assert_eq!(of(&[micro], &away).behind, 2.0 + 74.0 - 32.0 / batches);
        assert_eq!(of(&[micro, "parallel.zero=2"], &away).behind, 42.0 + 2.0 * batches);
        // State goes and comes, sums come alone: 40 bytes, 20 s, beside the update's 5.
        assert_eq!(of(&[], &away).moving, 15.0);
    }
}
