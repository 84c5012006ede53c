//! What one rank publishes for one round: its request, which owns the buffers, and where their bytes are.

use super::place::BufferPlace;
use crate::operation::{Operation, Request};
use crate::sync::UnsafeCell;

/// A published request. While published, nobody holds a reference to buffer contents through `request`; contents
/// are reached through the places, under the rules of `moves`.
pub(crate) struct Entry {
    pub(crate) request: Request,
    /// What peers read: `send`, or the buffer in place.
    pub(super) source: BufferPlace,
    /// What the owner writes: `recv`, or the buffer in place. The cell stands for the owner's chunk
    /// of an all-reduce, written in one phase and read by peers in the next, so that loom sees those accesses.
    target: UnsafeCell<BufferPlace>,
}

impl Entry {
    /// Takes a validated request.
    pub(crate) fn new(mut request: Request) -> Self {
        let [source, target] = match &mut request.operation {
            Operation::Barrier => [BufferPlace::nowhere(); 2],
            Operation::Broadcast { buf, .. } | Operation::AllReduce { buf, .. } => [BufferPlace::of(buf); 2],
            Operation::AllGather { send, recv, .. }
            | Operation::ReduceScatter { send, recv, .. }
            | Operation::AllToAll { send, recv, .. } => [send, recv].map(BufferPlace::of),
        };
        Entry { request, source, target: UnsafeCell::new(target) }
    }

    /// What the round is about.
    pub(crate) fn operation(&self) -> &Operation {
        &self.request.operation
    }

    /// Whether there is nothing to give back, so that the entry may stay where peers read it.
    pub(super) fn lends_nothing(&self) -> bool {
        matches!(self.request.operation, Operation::Barrier)
    }

    /// Where the owner writes; only the owner asks, while no peer reads its chunk.
    pub(super) fn target_to_write(&self) -> BufferPlace {
        // SAFETY: the pointer itself never changes; the mutable access marks the owner's exclusive phase.
        self.target.with_mut(|target| unsafe { *target })
    }

    /// Where a peer reads the owner's finished chunk.
    pub(super) fn target_to_read(&self) -> BufferPlace {
        // SAFETY: the pointer itself never changes.
        self.target.with(|target| unsafe { *target })
    }
}

// SAFETY: the pointers lead into buffers the entry owns; who may follow them when is the rendezvous' protocol.
unsafe impl Send for Entry {}
