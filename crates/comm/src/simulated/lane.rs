//! Control lanes of a simulated world: the queues of [`crate::control::mailbox`], at whose ends signals arrive late.

use std::sync::Arc;

use super::turns::{Channel, Turns};
use crate::bell::Bell;
use crate::control::{ControlLane, Inbox, OnFailure, Received, Signal};

/// Lanes between all ranks, in rank order; those of one world are told apart by `number`.
pub(super) fn simulated_lanes(turns: &Arc<Turns>, number: usize) -> Vec<Arc<dyn ControlLane>> {
    let boxes: Arc<[Arc<Inbox>]> = (0..turns.size()).map(|_| Inbox::new()).collect();
    for (from, to) in turns.pairs() {
        let inbox = boxes[to].clone();
        let reason = "its connection to the control lane closed before it left".to_owned();
        let signal = Signal::Failed { rank: from, reason, site: None };
        let closing = Box::new(move || inbox.post(from, signal));
        turns.on_death(Channel::Signals { number, from, to }, closing);
    }
    let lane = |rank| -> Arc<dyn ControlLane> {
        Arc::new(SimulatedLane { rank, number, boxes: boxes.clone(), turns: turns.clone() })
    };
    (0..turns.size()).map(lane).collect()
}

struct SimulatedLane {
    rank: usize,
    number: usize,
    /// Those of all ranks.
    boxes: Arc<[Arc<Inbox>]>,
    turns: Arc<Turns>,
}

impl ControlLane for SimulatedLane {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.boxes.len()
    }

    fn send(&self, to: usize, signal: &Signal) {
        let (from, inbox, signal) = (self.rank, self.boxes[to].clone(), signal.clone());
        let channel = Channel::Signals { number: self.number, from, to };
        self.turns.send(channel, Box::new(move || inbox.post(from, signal)));
    }

    fn receive(&self) -> Option<Received> {
        self.turns.check(self.rank);
        self.boxes[self.rank].take()
    }

    fn bell(&self) -> &Arc<Bell> {
        self.boxes[self.rank].bell()
    }

    fn on_failure(&self, call: OnFailure) {
        self.boxes[self.rank].on_failure(call);
    }
}

impl Drop for SimulatedLane {
    fn drop(&mut self) {
        (self as &dyn ControlLane).send_all(&Signal::Left);
    }
}
