//! The time of a simulated world.

use std::sync::Arc;
use std::time::Duration;

use super::turns::{Turns, Wish};
use crate::bell::Sleeper;
use crate::clock::Clock;

/// The world's time, for one rank.
pub(super) struct SimulatedClock {
    pub(super) rank: usize,
    pub(super) turns: Arc<Turns>,
}

impl Clock for SimulatedClock {
    fn now(&self) -> Duration {
        self.turns.now()
    }

    fn wait_until<'a>(&self, deadline: Duration, sleeper: Sleeper<'a>) -> Sleeper<'a> {
        sleeper.meanwhile(|| self.turns.pause(self.rank, Wish::News(deadline)))
    }

    fn linger(&self, _: u32, deadline: Duration) {
        self.turns.pause(self.rank, Wish::News(deadline));
    }
}
