//! Messages of a simulated world: those of [`crate::messages::local`], which take their time. A message has left when it has
//! arrived, as a long one of MPI's has.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::turns::{Channel, Turns};
use crate::messages::{LocalPost, LocalTicket, PointToPoint, local};

/// The posts of all ranks, in rank order.
pub(super) fn simulated_posts(turns: &Arc<Turns>) -> Vec<SimulatedPost> {
    local(turns.size()).into_iter().map(|post| SimulatedPost { post, turns: turns.clone() }).collect()
}

/// One rank's post.
pub(super) struct SimulatedPost {
    post: LocalPost,
    turns: Arc<Turns>,
}

/// A message of [`SimulatedPost`].
pub(super) enum SimulatedTicket {
    /// Whether it has arrived.
    Sent(Arc<AtomicBool>),
    Awaited(LocalTicket),
}

impl PointToPoint for SimulatedPost {
    type Ticket = SimulatedTicket;

    /// So that some of a run's messages have several parts.
    const BYTES_MAX: usize = 1 << 13;

    fn rank(&self) -> usize {
        self.post.rank()
    }

    fn size(&self) -> usize {
        self.post.size()
    }

    fn tag_max(&self) -> u32 {
        self.post.tag_max()
    }

    unsafe fn send(&mut self, to: usize, tag: u32, bytes: *const u8, len: usize) -> Result<SimulatedTicket, String> {
        // SAFETY: the caller vouches for the bytes.
        let message = unsafe { std::slice::from_raw_parts(bytes, len) }.to_vec();
        let (post, has_arrived) = (self.post.clone(), Arc::new(AtomicBool::new(false)));
        let arrived = has_arrived.clone();
        let bring = move || {
            post.bring(to, tag, message);
            arrived.store(true, Ordering::Relaxed);
        };
        self.turns.send(Channel::Messages { from: self.post.rank(), to, tag }, Box::new(bring));
        Ok(SimulatedTicket::Sent(has_arrived))
    }

    unsafe fn receive(&mut self, from: usize, tag: u32, bytes: *mut u8, len: usize) -> Result<SimulatedTicket, String> {
        // SAFETY: the caller vouches for the memory.
        unsafe { self.post.receive(from, tag, bytes, len) }.map(SimulatedTicket::Awaited)
    }

    fn is_done(&mut self, ticket: &mut SimulatedTicket) -> Result<bool, String> {
        match ticket {
            SimulatedTicket::Sent(has_arrived) => Ok(has_arrived.load(Ordering::Relaxed)),
            SimulatedTicket::Awaited(ticket) => self.post.is_done(ticket),
        }
    }
}
