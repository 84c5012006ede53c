//! Makes messages take the time that a network of given links would need: real waiting, which computation between
//! start and wait hides, as it would there.
//!
//! Ranks are on nodes of `ranks_per_node` consecutive ranks of the world. A rank has two links: to the ranks of its
//! node and to all others. An operation's bytes to and from the ranks behind a link (`bytes.rs`; the larger of the two
//! directions counts) occupy it for `latency + bytes / bandwidth`, one operation after the other in the order they were
//! started, whatever their group. `wait` returns no earlier than the last link is through.
//!
//! It is an emulation, not a prediction: each rank's clock runs from its own start, links are never shared between
//! ranks, and what the threads themselves take to copy and add comes on top where it takes longer. An operation within
//! one rank is free, and so are the exchanges inside `split` and `duplicate`.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::Wrapper;
use super::bytes::{received, sent};
use crate::Communicator;
use crate::error::Error;
use crate::operation::{Completed, Operation, Request};
use crate::pending::{InFlight, Pending};

/// What a message costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    pub latency: Duration,
    /// Bytes a second, each way.
    pub bandwidth: f64,
}

/// The links of all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Network {
    pub ranks_per_node: usize,
    pub within: Link,
    pub between: Link,
}

/// A communicator whose operations take time; so do those of what is split from it, on the same links.
pub struct Delay {
    inner: Arc<dyn Communicator>,
    links: Arc<Links>,
    /// By rank of this group, whether it is on this rank's node.
    near: Arc<[bool]>,
}

/// One rank's links, and until when each is occupied.
struct Links {
    network: Network,
    node: usize,
    busy_until: Mutex<[Instant; 2]>,
}

impl Link {
    /// Costs nothing.
    pub const FREE: Link = Link { latency: Duration::ZERO, bandwidth: f64::INFINITY };

    fn time(&self, bytes: u64) -> Duration {
        self.latency + Duration::from_secs_f64(bytes as f64 / self.bandwidth)
    }
}

impl Delay {
    /// `inner`, a world, with the costs of `network`.
    ///
    /// # Panics
    /// If nodes have no ranks.
    pub fn wrap(inner: Arc<dyn Communicator>, network: Network) -> Arc<dyn Communicator> {
        let node = |rank: usize| rank / network.ranks_per_node;
        let own = node(inner.rank());
        let near = (0..inner.size()).map(|rank| node(rank) == own).collect();
        let links = Links { network, node: own, busy_until: Mutex::new([Instant::now(); 2]) };
        Arc::new(Delay { inner, links: Arc::new(links), near })
    }

    /// Bytes behind each link; nothing where nobody is.
    fn loads(&self, operation: &Operation) -> [Option<u64>; 2] {
        let (rank, size) = (self.rank(), self.size());
        [true, false].map(|near| {
            let others = || (0..size).filter(move |&other| other != rank && self.near[other] == near);
            let bytes = sent(operation, rank, size, others()).max(received(operation, rank, size, others()));
            others().next().map(|_| bytes)
        })
    }
}

impl Links {
    /// Occupies the links from `now` on, and says until when.
    fn occupy(&self, now: Instant, loads: [Option<u64>; 2]) -> Instant {
        let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        let mut through = now;
        for ((link, busy_until), load) in self.links().into_iter().zip(busy_until.iter_mut()).zip(loads) {
            if let Some(bytes) = load {
                *busy_until = now.max(*busy_until) + link.time(bytes);
                through = through.max(*busy_until);
            }
        }
        through
    }

    fn links(&self) -> [Link; 2] {
        [self.network.within, self.network.between]
    }
}

impl Wrapper for Delay {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Delay { inner, links: self.links.clone(), near: self.near.clone() })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        let loads = self.loads(&request.operation);
        let pending = self.inner.start(request)?;
        let through = self.links.occupy(Instant::now(), loads);
        Ok(Pending::in_flight(Box::new(OnTheWire { pending, through })))
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        let inner = self.inner.split(color, key)?;
        let own = self.links.node as u64;
        let near = inner.all_gather_u64(&[own])?.into_iter().map(|node| node == own).collect();
        Ok(Arc::new(Delay { inner, links: self.links.clone(), near }))
    }
}

/// An operation whose bytes are under way until a known time.
struct OnTheWire {
    pending: Pending,
    through: Instant,
}

impl InFlight for OnTheWire {
    fn wait(self: Box<Self>) -> Result<Completed, Error> {
        // The threads' own copying is part of the time the wire is said to take, so it comes first.
        let completed = self.pending.wait()?;
        wait_until(self.through);
        Ok(completed)
    }
}

/// What a sleep may come late by; the rest of a wait only yields.
const SLEEP_LATENESS: Duration = Duration::from_micros(100);

fn wait_until(time: Instant) {
    loop {
        let left = time.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        match left.checked_sub(SLEEP_LATENESS) {
            Some(sleep) if !sleep.is_zero() => thread::sleep(sleep),
            _ => thread::yield_now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Links of 1000 bytes a second within nodes and 100 between them.
    fn links() -> Links {
        let within = Link { latency: MS, bandwidth: 1000.0 };
        let between = Link { latency: 5 * MS, bandwidth: 100.0 };
        let network = Network { ranks_per_node: 2, within, between };
        Links { network, node: 0, busy_until: Mutex::new([Instant::now(); 2]) }
    }

    #[test]
    fn operations_queue_on_each_link() {
        let links = links();
        let start = Instant::now();
        let occupy = |after_ms: u32, loads, until_ms: u32| {
            let through = links.occupy(start + after_ms * MS, loads);
            assert_eq!(through, start + until_ms * MS, "{loads:?} at {after_ms} ms");
        };
        occupy(0, [Some(10), None], 11);
        occupy(2, [Some(10), None], 22);
        // The other link is idle, and is through first.
        occupy(3, [Some(100), Some(10)], 123);
        occupy(4, [None, Some(10)], 213);
        occupy(5, [None, None], 5);
        // Idle since 213 ms.
        occupy(500, [None, Some(0)], 505);
    }

    #[test]
    fn what_is_free_takes_no_time() {
        assert_eq!(Link::FREE.time(u64::MAX), Duration::ZERO);
    }
}
