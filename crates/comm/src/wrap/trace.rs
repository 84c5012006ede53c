//! Counts what this rank sends, by group and collective, and the time it waits.
//!
//! Bytes are those this rank must send to *others* over a wire, whatever the implementation really does; n is the
//! size of the group:
//!
//! | collective | bytes sent by this rank |
//! |---|---|
//! | barrier | 0 |
//! | broadcast | at the root (n-1) x buffer, elsewhere 0 |
//! | all_reduce | 2 (n-1)/n x buffer, what a ring sends, rounded down |
//! | all_gather | (n-1) x own contribution |
//! | reduce_scatter | the parts of `send` that belong to others; (n-1)/n of it if counts are equal |
//! | all_to_all | the parts of `send` that go to others |
//!
//! Waiting is the wall-clock time this rank spends starting operations and waiting for them: for ranks that are late, and
//! while the operation moves and adds bytes. What overlaps with other work of the rank is not waiting.
//!
//! The exchange inside `split` and `duplicate` is not counted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::Communicator;
use crate::error::Error;
use crate::operation::{Collective, Completed, Operation, Request};
use crate::pending::{InFlight, Pending};

/// Calls and bytes of one collective in one group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Operations started.
    pub calls: u64,
    /// Bytes this rank sent to others; see the table in the file's header.
    pub bytes: u64,
}

/// What one rank has sent so far and how long it waited, over all communicators that come from one traced one.
#[derive(Debug, Default)]
pub struct Ledger {
    traffic: Mutex<BTreeMap<(String, Collective), Traffic>>,
    waited_ns: AtomicU64,
}

impl Ledger {
    /// The figures so far, by communicator name and collective.
    pub fn snapshot(&self) -> BTreeMap<(String, Collective), Traffic> {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The time waited so far; see the file's header.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed))
    }

    fn record(&self, name: &str, collective: Collective, bytes: u64) {
        let mut entries = self.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        let traffic = entries.entry((name.to_string(), collective)).or_default();
        traffic.calls += 1;
        traffic.bytes += bytes;
    }

    /// Runs `f`, whose time is waiting.
    fn timed<T>(&self, f: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let result = f();
        self.waited_ns.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }
}

/// An operation whose wait is timed.
struct Timed {
    inner: Pending,
    ledger: Arc<Ledger>,
}

impl InFlight for Timed {
    fn wait(self: Box<Self>) -> Result<Completed, Error> {
        let Timed { inner, ledger } = *self;
        ledger.timed(|| inner.wait())
    }
}

/// A communicator that counts. What is split from it reports to the same ledger, under its own name: choose that
/// with [`Communicator::named`], as in `world.split(color, key)?.named("expert")`.
pub struct Trace {
    inner: Arc<dyn Communicator>,
    ledger: Arc<Ledger>,
}

impl Trace {
    /// `inner`, counted, and where to read the counts.
    pub fn wrap(inner: Arc<dyn Communicator>) -> (Arc<dyn Communicator>, Arc<Ledger>) {
        let ledger = Arc::new(Ledger::default());
        (Arc::new(Trace { inner, ledger: ledger.clone() }), ledger)
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Trace { inner, ledger: self.ledger.clone() })
    }
}

impl Communicator for Trace {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn named(&self, name: &str) -> Arc<dyn Communicator> {
        self.around(self.inner.named(name))
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        let collective = request.operation.collective();
        let bytes = bytes_sent(&request.operation, self.rank(), self.size());
        let inner = self.ledger.timed(|| self.inner.start(request))?;
        self.ledger.record(self.name(), collective, bytes);
        Ok(Pending::in_flight(Box::new(Timed { inner, ledger: self.ledger.clone() })))
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        Ok(self.around(self.inner.split(color, key)?))
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        Ok(self.around(self.inner.duplicate()?))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}

/// Bytes rank `rank` of `size` sends to others; see the table above. Tolerates requests that will be refused.
fn bytes_sent(operation: &Operation, rank: usize, size: usize) -> u64 {
    let others = size - 1;
    let bytes = match operation {
        Operation::Barrier => 0,
        Operation::Broadcast { root, buf } => {
            if *root == rank {
                others * buf.bytes()
            } else {
                0
            }
        }
        Operation::AllReduce { buf, .. } => 2 * others * buf.bytes() / size,
        Operation::AllGather { send, .. } => others * send.bytes(),
        Operation::ReduceScatter { send, counts, .. } | Operation::AllToAll { send, send_counts: counts, .. } => {
            let own = counts.get(rank).copied().unwrap_or(0);
            send.len().saturating_sub(own) * send.kind().size()
        }
    };
    bytes as u64
}
