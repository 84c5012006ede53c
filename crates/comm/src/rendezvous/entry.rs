//! What one rank publishes for one round: its request, which owns the buffers, and where their bytes are.

use crate::operation::{Operation, Request};
use crate::sync::UnsafeCell;

/// A published request. While published, nobody holds a reference to buffer contents through `request`; contents
/// are reached through the pointers, under the rules of `moves`.
pub(crate) struct Entry {
    pub(crate) request: Request,
    /// First byte of what peers read: `send`, or the buffer in place.
    pub(crate) source: *const u8,
    /// First byte of what the owner writes: `recv`, or the buffer in place. The cell stands for the owner's chunk
    /// of an all-reduce, written in one phase and read by peers in the next, so that loom sees those accesses.
    pub(crate) target: UnsafeCell<*mut u8>,
}

impl Entry {
    /// Takes a validated request.
    pub(crate) fn new(mut request: Request) -> Self {
        let (source, target) = match &mut request.operation {
            Operation::Barrier => (std::ptr::null(), std::ptr::null_mut()),
            Operation::Broadcast { buf, .. } | Operation::AllReduce { buf, .. } => {
                let buf = buf.as_mut_bytes_ptr();
                (buf.cast_const(), buf)
            }
            Operation::AllGather { send, recv, .. }
            | Operation::ReduceScatter { send, recv, .. }
            | Operation::AllToAll { send, recv, .. } => (send.as_mut_bytes_ptr().cast_const(), recv.as_mut_bytes_ptr()),
        };
        Entry { request, source, target: UnsafeCell::new(target) }
    }

    /// What the round is about.
    pub(crate) fn operation(&self) -> &Operation {
        &self.request.operation
    }

    /// Where the owner writes; only the owner asks, while no peer reads its chunk.
    pub(crate) fn target_to_write(&self) -> *mut u8 {
        // SAFETY: the pointer itself never changes; the mutable access marks the owner's exclusive phase.
        self.target.with_mut(|target| unsafe { *target })
    }

    /// Where a peer reads the owner's finished chunk.
    pub(crate) fn target_to_read(&self) -> *const u8 {
        // SAFETY: the pointer itself never changes.
        self.target.with(|target| unsafe { (*target).cast_const() })
    }
}

// SAFETY: the pointers lead into buffers the entry owns; who may follow them when is the rendezvous' protocol.
unsafe impl Send for Entry {}
