//! Makes messages take the time that a network of given links would need: real waiting, which computation between
//! start and wait hides, as it would there.
//!
//! Ranks are on nodes of `ranks_per_node` consecutive ranks of the world. A rank has two links: to the ranks of its
//! node and to all others. An operation's messages and bytes to and from the ranks behind a link (`bytes.rs`; the larger of
//! the two directions counts) occupy it for `latency + messages * message + bytes / bandwidth`, one operation after the other
//! in the order they were started, whatever their group. `wait` returns no earlier than the last link is through.
//!
//! It is an emulation, not a prediction: each rank's clock runs from its own start, links are never shared between
//! ranks, and what the threads themselves take to copy and add comes on top where it takes longer. An operation within
//! one rank is free, and so are the exchanges inside `split` and `duplicate`.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::Wrapper;
use super::bytes::{Wired, received, sent};
use crate::Communicator;
use crate::error::Error;
use crate::operation::{Completed, Operation, Request};
use crate::pending::{InFlight, Pending};

/// What an operation costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Of each operation, however many ranks are behind the link.
    pub latency: Duration,
    /// Of each message, however short.
    pub message: Duration,
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
    pub const FREE: Link = Link { latency: Duration::ZERO, message: Duration::ZERO, bandwidth: f64::INFINITY };

    fn time(&self, Wired { messages, bytes }: Wired) -> Duration {
        let each = self.message.saturating_mul(u32::try_from(messages).unwrap_or(u32::MAX));
        self.latency + each + Duration::from_secs_f64(bytes as f64 / self.bandwidth)
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

    /// What goes over each link; nothing where nobody is behind it.
    fn loads(&self, operation: &Operation) -> [Option<Wired>; 2] {
        let (rank, size) = (self.rank(), self.size());
        [true, false].map(|near| {
            let others = || (0..size).filter(move |&other| other != rank && self.near[other] == near);
            let load = sent(operation, rank, size, others()).max(received(operation, rank, size, others()));
            others().next().map(|_| load)
        })
    }
}

impl Links {
    /// Occupies the links from `now` on, and says until when.
    fn occupy(&self, now: Instant, loads: [Option<Wired>; 2]) -> Instant {
        let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        let mut through = now;
        for ((link, busy_until), load) in self.links().into_iter().zip(busy_until.iter_mut()).zip(loads) {
            if let Some(load) = load {
                *busy_until = now.max(*busy_until) + link.time(load);
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

    /// Links of 1000 bytes a second within nodes and 100 between them, where each message takes 2 ms.
    fn links() -> Links {
        let within = Link { latency: MS, message: Duration::ZERO, bandwidth: 1000.0 };
        let between = Link { latency: 5 * MS, message: 2 * MS, bandwidth: 100.0 };
        let network = Network { ranks_per_node: 2, within, between };
        Links { network, node: 0, busy_until: Mutex::new([Instant::now(); 2]) }
    }

    #[test]
    fn operations_queue_on_each_link() {
        let links = links();
        let start = Instant::now();
        let occupy = |after_ms: u32, loads: [Option<u64>; 2], until_ms: u32| {
            let loads = loads.map(|bytes| Some(Wired { messages: bytes?.min(1), bytes: bytes? }));
            let through = links.occupy(start + after_ms * MS, loads);
            assert_eq!(through, start + until_ms * MS, "{loads:?} at {after_ms} ms");
        };
        occupy(0, [Some(10), None], 11);
        occupy(2, [Some(10), None], 22);
        // The other link is idle, and is through first.
        occupy(3, [Some(100), Some(10)], 123);
        occupy(4, [None, Some(10)], 217);
        occupy(5, [None, None], 5);
        // Idle since 217 ms.
        occupy(500, [None, Some(0)], 505);
    }

    #[test]
    fn what_is_free_takes_no_time() {
        assert_eq!(Link::FREE.time(Wired { messages: u64::MAX, bytes: u64::MAX }), Duration::ZERO);
    }
}
