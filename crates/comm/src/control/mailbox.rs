//! A control lane between ranks that are threads of this process: a queue for each of them.

use std::sync::Arc;

use super::inbox::Inbox;
use super::{ControlLane, OnFailure, Received, Signal};
use crate::bell::Bell;

/// The lanes of a world of `size` ranks, in rank order.
pub fn lanes(size: usize) -> Vec<Arc<dyn ControlLane>> {
    let boxes: Arc<[Arc<Inbox>]> = (0..size).map(|_| Inbox::new()).collect();
    let lane = |rank| -> Arc<dyn ControlLane> { Arc::new(Mailbox { rank, boxes: boxes.clone() }) };
    (0..size).map(lane).collect()
}

struct Mailbox {
    rank: usize,
    /// Those of all ranks.
    boxes: Arc<[Arc<Inbox>]>,
}

impl ControlLane for Mailbox {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.boxes.len()
    }

    fn send(&self, to: usize, signal: &Signal) {
        self.boxes[to].post(self.rank, signal.clone());
    }

    fn receive(&self) -> Option<Received> {
        self.boxes[self.rank].take()
    }

    fn bell(&self) -> &Arc<Bell> {
        self.boxes[self.rank].bell()
    }

    fn on_failure(&self, call: OnFailure) {
        self.boxes[self.rank].on_failure(call);
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        (self as &dyn ControlLane).send_all(&Signal::Left);
    }
}
