//! Makes ranks late, and lets one die, by a seed: to show that no order of events breaks the protocol.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use super::Wrapper;
use crate::Communicator;
use crate::digest::mix;
use crate::error::Error;
use crate::operation::{Completed, Request};
use crate::pending::{InFlight, Pending};

/// What to do to a rank.
#[derive(Debug, Clone, Copy)]
pub struct Faults {
    /// Which delays are drawn; the same seed delays the same operations of a rank equally.
    pub seed: u64,
    /// The longest delay before a start or a wait. A quarter of the draws delay, a quarter only yield.
    pub delay_max: Duration,
    /// When the rank dies, if it does.
    pub death: Option<Death>,
}

/// The end of a rank.
#[derive(Debug, Clone, Copy)]
pub struct Death {
    /// The operation that is refused, counted from 0 over all communicators that come from the wrapped one.
    pub at_operation: u64,
    /// Whether peers are told by an abort, as after a crash that is noticed, or must find out by their timeouts.
    pub announced: bool,
}

/// A communicator that is unreliable on purpose; so is what is split from it.
pub struct Fault {
    inner: Arc<dyn Communicator>,
    script: Arc<FaultScript>,
}

/// What happens to one rank, shared by all its communicators.
struct FaultScript {
    faults: Faults,
    rank: u64,
    draws: AtomicU64,
    operations: AtomicU64,
}

impl Fault {
    /// `inner`, made unreliable.
    pub fn wrap(inner: Arc<dyn Communicator>, faults: Faults) -> Arc<dyn Communicator> {
        let rank = inner.rank() as u64;
        let script = FaultScript { faults, rank, draws: AtomicU64::new(0), operations: AtomicU64::new(0) };
        Arc::new(Fault { inner, script: Arc::new(script) })
    }

    /// Counts one more operation; an error if it is one the rank does not live to see.
    fn live(&self) -> Result<(), Error> {
        let operation = self.script.operations.fetch_add(1, Ordering::Relaxed);
        let Some(death) = self.script.faults.death.filter(|death| operation >= death.at_operation) else {
            return Ok(());
        };
        let reason = format!("died at its operation {} as its fault script asks", death.at_operation);
        if death.announced {
            self.inner.abort(&reason);
        }
        Err(Error::aborted(self.script.rank as usize, reason))
    }
}

impl FaultScript {
    /// Waits for the next drawn time.
    fn dawdle(&self) {
        let draw = self.draws.fetch_add(1, Ordering::Relaxed);
        let bits = mix(mix(self.faults.seed ^ mix(self.rank)) ^ draw);
        match bits % 4 {
            0 => thread::sleep(self.faults.delay_max.mul_f64((bits >> 11) as f64 / (1u64 << 53) as f64)),
            1 => thread::yield_now(),
            _ => {}
        }
    }
}

impl Wrapper for Fault {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Fault { inner, script: self.script.clone() })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        self.live()?;
        self.script.dawdle();
        let pending = self.inner.start(request)?;
        Ok(Pending::in_flight(Box::new(Delayed { pending, script: self.script.clone() })))
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        self.live()?;
        self.script.dawdle();
        Ok(self.around(self.inner.split(color, key)?))
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        self.live()?;
        self.script.dawdle();
        Ok(self.around(self.inner.duplicate()?))
    }
}

/// An operation that is awaited late.
struct Delayed {
    pending: Pending,
    script: Arc<FaultScript>,
}

impl InFlight for Delayed {
    fn wait(self: Box<Self>) -> Result<Completed, Error> {
        self.script.dawdle();
        self.pending.wait()
    }
}
