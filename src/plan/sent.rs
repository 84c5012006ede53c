//! What a rank sends in a step that is walked, and the memory in which devices add up.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use guildhall_comm::sizes::{self, GroupView};
use guildhall_comm::{Collective, Operation, Payload};
use guildhall_tensor::{Device, Phase, REDUCED_PIECE};

use super::books::{Messages, PlannedTraffic, When};
use super::layout::Layout;
use crate::parallel::Axis;

/// Counts what a rank sends, as ledgers of real runs do, and when.
pub(super) struct Sent {
    device: Arc<Device>,
    /// By the name of the groups.
    axes: Vec<(String, Axis)>,
    messages: Mutex<Messages>,
    /// Devices add up what they send.
    reduces_on_devices: bool,
    /// The most bytes that one of them has brought together.
    workspace: AtomicU64,
}

impl Sent {
    pub(super) fn new(device: Arc<Device>, layout: &Layout) -> Sent {
        let nodes = layout.degrees.distinct().into_iter().map(Axis::ExpertNode);
        let axes = layout.degrees.axes(&layout.mesh).into_iter().chain(nodes);
        let axes = axes.map(|axis| (layout.degrees.name(axis), axis)).collect();
        let reduces_on_devices = layout.on_accelerators && !layout.sums_by_host;
        Sent { device, axes, messages: Mutex::default(), reduces_on_devices, workspace: AtomicU64::new(0) }
    }

    pub(super) fn count(&self, group: GroupView, operation: &Operation) {
        let axis = self.axes.iter().find(|(name, _)| name == group.name).expect("a group of the mesh").1;
        let (books, collective) = (self.device.books().expect("a device of sizes keeps books"), operation.collective());
        if self.reduces_on_devices {
            self.workspace.fetch_max(brought_together(group, operation), Relaxed);
        }
        let times = books.times();
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = sizes::sent(group, operation);
        let sent = PlannedTraffic { calls: times, messages: sent.messages * times, bytes: sent.bytes * times };
        *messages.entry((axis, collective, when(axis, operation, books.phase()))).or_default() += sent;
    }

    pub(super) fn messages(&self) -> Messages {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes that a device keeps for what it adds up, from its first reduction on.
    pub(super) fn workspace(&self) -> u64 {
        self.workspace.load(Relaxed)
    }
}

/// Where shares of a rank begin, in bytes.
const LINE_BYTES: usize = 64;

/// Bytes that this rank's device brings together of all ranks at a time, where tensors are reduced.
fn brought_together(group: GroupView, operation: &Operation) -> u64 {
    let own = match operation {
        Operation::AllReduce { buf: Payload::Opaque(kind, len), .. } => {
            let bytes = len * kind.size();
            bytes.div_ceil(group.size).next_multiple_of(LINE_BYTES).min(bytes)
        }
        Operation::ReduceScatter { send: Payload::Opaque(kind, _), counts, .. } => counts[group.rank] * kind.size(),
        _ => 0,
    };
    // A world of one adds nothing up.
    if group.size == 1 { 0 } else { (group.size * own.min(REDUCED_PIECE)) as u64 }
}

/// Gradients leave while backward goes on, and weights come while another part of the model computes. All else is waited
/// for.
fn when(axis: Axis, operation: &Operation, phase: Phase) -> When {
    let of_holders = matches!(axis, Axis::World | Axis::Data | Axis::ExpertData(_));
    match (operation.collective(), operation) {
        (Collective::AllReduce | Collective::ReduceScatter, _) if of_holders && phase == Phase::Backward => {
            When::Behind
        }
        (_, Operation::AllGather { send: Payload::Opaque(..), .. }) if of_holders && phase != Phase::Update => {
            When::Ahead
        }
        _ => When::Now,
    }
}

#[cfg(test)]
mod tests {
    use guildhall_comm::{ElementKind, Reduce};

    use super::*;

    /// A piece of each rank at a time, and no more than there is.
    #[test]
    fn a_large_sum_takes_no_more_than_a_piece_of_each_rank() {
        let group = GroupView { name: "data", rank: 1, size: 4 };
        let sum = |len: usize| {
            let buf = Payload::Opaque(ElementKind::F32, len);
            brought_together(group, &Operation::AllReduce { reduce: Reduce::Sum, buf })
        };
        assert_eq!([64, 1000, 1 << 24].map(sum), [4 * 64, 4 * 1024, 4 * REDUCED_PIECE as u64]);
        let scattered = |counts: [usize; 4]| {
            let [send, recv] = [counts.iter().sum(), counts[1]].map(|len| Payload::Opaque(ElementKind::Bf16, len));
            brought_together(
                group,
                &Operation::ReduceScatter { reduce: Reduce::Sum, send, recv, counts: counts.into() },
            )
        };
        assert_eq!(scattered([9, 5, 9, 9]), 4 * 10);
        let host = Operation::AllReduce { reduce: Reduce::Sum, buf: vec![0.0f32; 99].into() };
        assert_eq!(brought_together(group, &host), 0, "what the host adds up");
    }
}
