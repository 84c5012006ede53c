//! What a process has heard of the others' ranks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use guildhall_comm::control::{ControlLane, Received, Signal};

/// What a process says while others wait for it. It stops when the process does, or waits for its disk.
pub(super) const PULSE: &str = "still at it";

/// What other ranks have said and has not been asked for yet.
#[derive(Default)]
pub(super) struct Heard {
    pub(super) words: BTreeMap<usize, VecDeque<String>>,
    /// When each last said anything.
    pub(super) last: BTreeMap<usize, Duration>,
    /// The first of whom was said that it has failed, by its connection or by who waited for it.
    pub(super) failed: Option<usize>,
    /// Who will say no more, and why.
    pub(super) lost: BTreeMap<usize, String>,
}

impl Heard {
    /// The next words of a rank, or why there will be none; nothing as long as neither is known.
    pub(super) fn of(&mut self, rank: usize) -> Option<Result<String, String>> {
        if let Some(words) = self.words.get_mut(&rank).and_then(VecDeque::pop_front) {
            return Some(Ok(words));
        }
        // Who left may have done so because another failed.
        self.lost.get(&rank).map(|own| Err(self.cause().unwrap_or(own).clone()))
    }

    /// Why the first is gone that has failed.
    pub(super) fn cause(&self) -> Option<&String> {
        self.lost.get(&self.failed?)
    }

    /// Takes in what has come. The first failure is passed on, since who told it may have left before it told all.
    pub(super) fn learn(&mut self, Received { from, signal }: Received, lane: &Arc<dyn ControlLane>, now: Duration) {
        self.last.insert(from, now);
        match signal {
            Signal::Told(words) if words == PULSE => {}
            Signal::Told(words) => self.words.entry(from).or_default().push_back(words),
            Signal::Failed { rank, reason, .. } => {
                if self.failed.is_none() {
                    self.failed = Some(rank);
                    lane.send_all(&Signal::Failed { rank, reason: reason.clone(), site: None });
                }
                self.lost.entry(rank).or_insert(format!("rank {rank} is gone: {reason}"));
            }
            Signal::Left => {
                self.lost.entry(from).or_insert(format!("rank {from} left before it said how it ended"));
            }
            Signal::Arrived(_) | Signal::Waiting { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use guildhall_comm::control::mailbox;

    use super::*;

    /// Not who left because of it.
    #[test]
    fn who_failed_first_is_the_cause() {
        let (lanes, mut heard) = (mailbox::lanes(3), Heard::default());
        let mut learn = |from, signal| heard.learn(Received { from, signal }, &lanes[0], Duration::ZERO);
        learn(1, Signal::Failed { rank: 1, reason: "it was killed".to_owned(), site: None });
        learn(2, Signal::Told("its last words".to_owned()));
        learn(2, Signal::Left);
        assert_eq!(heard.of(2), Some(Ok("its last words".to_owned())));
        for rank in [1, 2] {
            assert_eq!(heard.of(rank), Some(Err("rank 1 is gone: it was killed".to_owned())));
        }
        assert_eq!(heard.of(0), None);
        let mut alone = Heard::default();
        alone.learn(Received { from: 2, signal: Signal::Left }, &lanes[0], Duration::ZERO);
        assert_eq!(alone.of(2), Some(Err("rank 2 left before it said how it ended".to_owned())));
    }
}
