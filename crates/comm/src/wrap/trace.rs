//! Counts what this rank sends, by group and collective, and the time it waits.
//!
//! Messages and bytes are those this rank must send to others over a wire, by the table at the head of `bytes.rs`.
//!
//! Waiting is the wall-clock time this rank spends starting operations and waiting for them: for ranks that are late, and
//! while the operation moves and adds bytes. What overlaps with other work of the rank is not waiting.
//!
//! The exchange inside `split` and `duplicate` is not counted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Wrapper;
use super::bytes::{Wired, sent};
use crate::Communicator;
use crate::error::Error;
use crate::operation::{Collective, Completed, Request};
use crate::pending::{InFlight, Pending};

/// Calls, messages and bytes of one collective in one group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Operations started.
    pub calls: u64,
    /// Messages that this rank sent to others; the table is in `bytes.rs`.
    pub messages: u64,
    /// Bytes that it sent to others.
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

    /// Runs `f`, whose traffic and waiting are not counted: what a run does to know its machine is no part of it. This
    /// rank's thread alone may use the communicators meanwhile.
    pub fn uncounted<T>(&self, f: impl FnOnce() -> T) -> T {
        let (traffic, waited_ns) = (self.snapshot(), self.waited_ns.load(Ordering::Relaxed));
        let result = f();
        *self.traffic.lock().unwrap_or_else(PoisonError::into_inner) = traffic;
        self.waited_ns.store(waited_ns, Ordering::Relaxed);
        result
    }

    /// The time waited so far; see the file's header.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed))
    }

    fn record(&self, name: &str, collective: Collective, sent: Wired) {
        let mut entries = self.traffic.lock().unwrap_or_else(PoisonError::into_inner);
        let traffic = entries.entry((name.to_string(), collective)).or_default();
        traffic.calls += 1;
        traffic.messages += sent.messages;
        traffic.bytes += sent.bytes;
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
}

impl Wrapper for Trace {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Trace { inner, ledger: self.ledger.clone() })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        let collective = request.operation.collective();
        let (rank, size) = (self.rank(), self.size());
        let sent = sent(&request.operation, rank, size, (0..size).filter(|&other| other != rank));
        let inner = self.ledger.timed(|| self.inner.start(request))?;
        self.ledger.record(self.name(), collective, sent);
        Ok(Pending::in_flight(Box::new(Timed { inner, ledger: self.ledger.clone() })))
    }
}
