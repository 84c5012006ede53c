//! All-to-alls of ranks on several nodes, in legs: what is for ranks of one node crosses to it together.
//!
//! ```text
//!   nodes {0 1} {2 3}       two_d                               two_level
//!   what 0 sends to 2, 3    0 ═▶ 2 ─▶ 3                         0 ─▶ 1 ═▶ 3 ─▶ 2
//!   what 1 sends to 2, 3    1 ═▶ 3 ─▶ 2                              1 ═▶ 3 ─▶ 2
//!   crossing ═▶             a message a rank and other node     a message a node and other node
//!   within ─▶               once                                before and after
//! ```
//!
//! `two_d`: a rank sends all that is for a node to one rank there, which hands it on; the ranks of a node are dealt those of
//! another evenly. `two_level`: for each pair of nodes one rank on either speaks; ranks of a node give it what is for the
//! other. Nodes may have different numbers of ranks, in any order. Parts within a node travel within it.
//!
//! Elements are moved and not changed, and each is received where and in the order in which a direct all-to-all has it. What an
//! intermediate rank has to hand on, its node knows: at first its ranks all-gather their counts.
//!
//! The legs up to the crossing begin with the operation, which waits for ranks of the own node alone; the crossing is under
//! way until somebody waits. Intermediate ranks hand on while they wait: so ranks begin and await these operations at the same
//! places of their program, on all communicators with such ways together, or drop them there. What is dropped is finished
//! before the next begins. What is wrapped begins operations when they are started, and not later as [`super::Agreement::wrap`].

mod route;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Wrapper;
use crate::Communicator;
use crate::error::{Error, left_in_flight};
use crate::operation::{Completed, Operation, Request};
use crate::payload::{Payload, copy_pieces};
use crate::pending::{InFlight, Pending};
use crate::validate::validate;
pub(crate) use route::RelayRoute;
use route::{LegCounts, ShipmentLengths};

/// How an all-to-all goes from node to node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NodeWay {
    /// Every rank to every other.
    Direct,
    /// By one rank for each pair of nodes, on either of them.
    TwoLevel,
    /// Between nodes first, from each rank to one of each other node; then within.
    TwoD,
}

impl NodeWay {
    pub const ALL: [NodeWay; 3] = [NodeWay::Direct, NodeWay::TwoLevel, NodeWay::TwoD];

    /// As recipes write it.
    pub fn name(self) -> &'static str {
        match self {
            NodeWay::Direct => "direct",
            NodeWay::TwoLevel => "two_level",
            NodeWay::TwoD => "two_d",
        }
    }

    /// Of each leg, whether it stays within nodes.
    fn legs(self) -> &'static [bool] {
        match self {
            NodeWay::Direct => &[],
            NodeWay::TwoLevel => &[true, false, true],
            NodeWay::TwoD => &[false, true],
        }
    }
}

/// A communicator whose all-to-alls go by nodes; all else goes as before.
pub struct Relay {
    inner: Arc<dyn Communicator>,
    lane: Arc<RelayLane>,
}

/// What communicators of one lane share, whatever their names.
struct RelayLane {
    whole: Arc<dyn Communicator>,
    within: Arc<dyn Communicator>,
    way: NodeWay,
    nodes: Vec<usize>,
    route: RelayRoute,
    journeys: Mutex<Journeys>,
}

#[derive(Default)]
struct Journeys {
    begun: u64,
    /// In the order in which they began.
    open: VecDeque<OpenJourney>,
    /// Finished for the sake of others.
    done: BTreeMap<u64, Result<Completed, Error>>,
}

/// An operation under way.
struct OpenJourney {
    number: u64,
    operation: Conveyance,
    /// Nobody wants the result.
    is_abandoned: bool,
}

enum Conveyance {
    ByNodes(Box<Journey>),
    Straight(Pending),
}

/// An all-to-all on its way by nodes.
struct Journey {
    inner: Arc<dyn Communicator>,
    site: &'static Location<'static>,
    lengths: ShipmentLengths,
    /// What the caller sends, unless the first leg does.
    send: Option<Payload>,
    /// Where the caller receives.
    recv: Payload,
    leg: usize,
    /// By shipment, the elements that the leg brings.
    coming: Vec<usize>,
    pending: Pending,
}

impl Relay {
    /// `inner` with all-to-alls that go `way`; `nodes` has the node of each rank, and `name` is what groups of ranks on one
    /// node are called. Collective.
    ///
    /// # Errors
    /// What the split reports.
    ///
    /// # Panics
    /// If `nodes` are not as many as ranks.
    pub fn wrap(
        inner: Arc<dyn Communicator>,
        nodes: &[usize],
        way: NodeWay,
        name: &str,
    ) -> Result<Arc<dyn Communicator>, Error> {
        assert_eq!(nodes.len(), inner.size(), "a node for each rank");
        if way == NodeWay::Direct {
            return Ok(inner);
        }
        let route = RelayRoute::new(way, nodes, inner.rank());
        let within = inner.group(route.mates())?.named(name);
        let (whole, nodes, journeys) = (inner.clone(), nodes.to_vec(), Mutex::default());
        Ok(Arc::new(Relay { inner, lane: Arc::new(RelayLane { whole, within, way, nodes, route, journeys }) }))
    }

    /// The ranks of this node tell each other what they send and receive.
    fn lengths(&self, site: &'static Location<'static>, counts: [&[usize]; 2]) -> Result<ShipmentLengths, Error> {
        let within = &self.lane.within;
        let own: Vec<u64> = counts.concat().into_iter().map(|count| count as u64).collect();
        let (each, mates) = (own.len(), within.size());
        let request = Request::all_gather(own, vec![0u64; each * mates], vec![each; mates]);
        Ok(ShipmentLengths(within.start(Request { site, ..request })?.wait()?.recv.into_u64()))
    }

    /// Starts a validated all-to-all, up to the leg between nodes.
    fn begin(&self, request: Request) -> Result<Journey, Error> {
        let Request { operation: Operation::AllToAll { send, send_counts, recv, recv_counts }, site } = request else {
            unreachable!("asked for an all-to-all")
        };
        self.lane.finish_abandoned();
        let lengths = self.lengths(site, [&send_counts, &recv_counts])?;
        let route = &self.lane.route;
        let is_packed = route.packing(0).iter().enumerate().all(|(place, held)| place == *held);
        let (send, packed) = match is_packed {
            true => (None, send),
            false => {
                let packed = arranged(&send, &send_counts, route.packing(0));
                (Some(send), packed)
            }
        };
        let (inner, pending) = (self.inner.clone(), Pending::finished(Ok(Completed::nothing())));
        let mut journey = Journey { inner, site, lengths, send, recv, leg: 0, coming: Vec::new(), pending };
        journey.set_out(&self.lane, packed)?;
        while route.is_within(journey.leg) && journey.leg + 1 < route.legs() {
            journey.go_on(&self.lane)?;
        }
        Ok(journey)
    }
}

impl Journey {
    /// Starts the leg with what it sends.
    fn set_out(&mut self, lane: &RelayLane, packed: Payload) -> Result<(), Error> {
        let LegCounts { send, receive, coming } = lane.route.counts(self.leg, &self.lengths);
        let recv = packed.zeros_alike(receive.iter().sum());
        let over = if lane.route.is_within(self.leg) { &lane.within } else { &self.inner };
        let request = Request::all_to_all(packed, send, recv, receive);
        self.pending = over.start(Request { site: self.site, ..request })?;
        self.coming = coming;
        Ok(())
    }

    /// What the leg has brought.
    fn arrive(&mut self) -> Result<Payload, Error> {
        let pending = std::mem::replace(&mut self.pending, Pending::finished(Ok(Completed::nothing())));
        let Completed { send, recv } = pending.wait()?;
        if self.leg == 0 && self.send.is_none() {
            self.send = send;
        }
        Ok(recv)
    }

    /// Waits for the leg and starts the next.
    fn go_on(&mut self, lane: &RelayLane) -> Result<(), Error> {
        let arrived = self.arrive()?;
        let packed = arranged(&arrived, &self.coming, lane.route.packing(self.leg + 1));
        self.leg += 1;
        self.set_out(lane, packed)
    }

    fn finish(mut self, lane: &RelayLane) -> Result<Completed, Error> {
        while self.leg + 1 < lane.route.legs() {
            self.go_on(lane)?;
        }
        let arrived = self.arrive()?;
        copy_pieces(&arrived, &mut self.recv, pieces(&self.coming, lane.route.packing(self.leg + 1)));
        Ok(Completed { send: self.send, recv: self.recv })
    }
}

/// Pieces of `payload`, of which it has so many elements each, in this order.
fn arranged(payload: &Payload, lengths: &[usize], order: &[usize]) -> Payload {
    let mut packed = payload.zeros_alike(payload.len());
    copy_pieces(payload, &mut packed, pieces(lengths, order));
    packed
}

fn pieces(lengths: &[usize], order: &[usize]) -> impl Iterator<Item = Range<usize>> {
    let after = |end: &mut usize, length: &usize| {
        *end += length;
        Some(*end - length..*end)
    };
    let ranges: Vec<Range<usize>> = lengths.iter().scan(0, after).collect();
    order.iter().map(move |&place| ranges[place].clone())
}

impl RelayLane {
    fn journeys(&self) -> MutexGuard<'_, Journeys> {
        self.journeys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, operation: Conveyance) -> u64 {
        let mut journeys = self.journeys();
        let number = journeys.begun;
        journeys.begun += 1;
        journeys.open.push_back(OpenJourney { number, operation, is_abandoned: false });
        number
    }

    /// Finishes all that began before the `until`-th, in that order: so every rank hands on in the same order.
    fn finish_before(&self, until: u64) {
        let mut journeys = self.journeys();
        while let Some(OpenJourney { number, operation, is_abandoned }) =
            journeys.open.pop_front_if(|open| open.number < until)
        {
            let result = match operation {
                Conveyance::ByNodes(journey) => journey.finish(self),
                Conveyance::Straight(pending) => pending.wait(),
            };
            if !is_abandoned {
                journeys.done.insert(number, result);
            }
        }
    }

    /// Finishes what others may wait for and this rank no more will.
    fn finish_abandoned(&self) {
        let last = self.journeys().open.iter().rfind(|open| open.is_abandoned).map(|last| last.number);
        last.iter().for_each(|last| self.finish_before(last + 1));
    }

    fn abandon(&self, number: u64) {
        let mut journeys = self.journeys();
        journeys.done.remove(&number);
        journeys.open.iter_mut().filter(|open| open.number == number).for_each(|open| open.is_abandoned = true);
    }
}

impl Drop for RelayLane {
    /// Other ranks wait for what this one should hand on.
    fn drop(&mut self) {
        let hands_on = |open: &&OpenJourney| matches!(open.operation, Conveyance::ByNodes(_));
        let left = self.journeys().open.iter().filter(hands_on).count();
        if left > 0 {
            self.whole.abort(&left_in_flight(left as u64));
        }
    }
}

impl Wrapper for Relay {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Relay { inner, lane: self.lane.clone() })
    }

    /// What goes by nodes is packed, in memory of its own.
    fn moves_devices(&self) -> bool {
        false
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        let (rank, size) = (self.inner.rank(), self.inner.size());
        // What makes no sense, or cannot be packed, goes where everything else does, and is refused there if need be.
        let is_sound = validate(&request, rank, size, rank).is_ok() && !request.operation.is_on_device();
        let operation = match &request.operation {
            Operation::AllToAll { .. } if is_sound => Conveyance::ByNodes(Box::new(self.begin(request)?)),
            _ => Conveyance::Straight(self.inner.start(request)?),
        };
        let number = self.lane.enter(operation);
        Ok(Pending::in_flight(Box::new(AwaitedJourney { lane: self.lane.clone(), number, is_awaited: false })))
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        let inner = self.inner.split(color, key)?;
        let nodes = inner.all_gather_u64(&[self.lane.nodes[self.inner.rank()] as u64])?;
        let nodes: Vec<usize> = nodes.into_iter().map(|node| node as usize).collect();
        Relay::wrap(inner, &nodes, self.lane.way, self.lane.within.name())
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        Relay::wrap(self.inner.duplicate()?, &self.lane.nodes, self.lane.way, self.lane.within.name())
    }
}

/// The place of an operation on its lane, for whoever waits for it.
struct AwaitedJourney {
    lane: Arc<RelayLane>,
    number: u64,
    is_awaited: bool,
}

impl InFlight for AwaitedJourney {
    fn wait(mut self: Box<Self>) -> Result<Completed, Error> {
        self.is_awaited = true;
        self.lane.finish_before(self.number + 1);
        self.lane.journeys().done.remove(&self.number).expect("it is finished once, and awaited once")
    }
}

impl Drop for AwaitedJourney {
    fn drop(&mut self) {
        if !self.is_awaited {
            self.lane.abandon(self.number);
        }
    }
}
