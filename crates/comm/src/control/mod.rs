//! The control lane: small signals between ranks beside the data, which go on when the data has been aborted.
//!
//! Ranks that share memory look at each other's requests and abort each other in place. Ranks that do not have a lane
//! instead: over it each says what it has come to and from which line, that it has failed and why, and that it leaves.
//! [`crate::wrap::Agreement`] makes of that the check that thread ranks have in place. Whoever makes ranks has a lane of its
//! own, over which processes tell each other in words what they have done and how their ranks ended.
//!
//! ```text
//!   send ──▶ mailbox::lanes     queues of one process                 ┐
//!            Doorway            TCP, frames of bytes as in `wire`     ├─▶ receive, in the order of each sender
//!                               a peer that ends unheard is Failed    ┘   bell: rung whenever something has come
//! ```

mod doorway;
mod inbox;
pub mod mailbox;
mod signal;
mod sockets;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use crate::bell::Bell;
use crate::clock::Clock;

pub use doorway::Doorway;
pub(crate) use inbox::Inbox;
pub use signal::{Arrival, Signal};
pub use wire::{BadSignal, FRAME_BYTES_MAX};

/// A signal and the rank of the world that sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    pub from: usize,
    pub signal: Signal,
}

/// One rank's end of the lane between all ranks of a world. Dropping it sends [`Signal::Left`] to all others.
///
/// Signals of one rank to another arrive in the order in which they were sent. Sending does not wait for the receiver.
/// Nothing that happens to a communicator closes the lane.
pub trait ControlLane: Send + Sync {
    /// This rank's place in the world.
    fn rank(&self) -> usize;

    /// Ranks of the world.
    fn size(&self) -> usize;

    /// Sends `signal` to rank `to`. Where that rank is gone nothing happens: it has been, or will be, received that it
    /// is.
    fn send(&self, to: usize, signal: &Signal);

    /// The next signal that has come, if one has.
    fn receive(&self) -> Option<Received>;

    /// Rung whenever a signal has come.
    fn bell(&self) -> &Arc<Bell>;

    /// Lets `call` be called whenever a [`Signal::Failed`] has come, on whatever thread: for ranks that wait for data and do not
    /// look at the lane. To be called once.
    fn on_failure(&self, call: OnFailure);
}

/// What a lane calls when a rank has failed.
pub type OnFailure = Box<dyn Fn() + Send + Sync>;

impl dyn ControlLane {
    /// Sends `signal` to all other ranks.
    pub fn send_all(&self, signal: &Signal) {
        (0..self.size()).filter(|&rank| rank != self.rank()).for_each(|rank| self.send(rank, signal));
    }

    /// The next signal, for which it waits until `deadline` by `clock`.
    pub fn receive_by(&self, clock: &dyn Clock, deadline: Duration) -> Option<Received> {
        self.bell().sleep_until(clock, deadline, || self.receive())
    }
}
