//! What one rank knows of all others, whatever groups it is in: the cause of the world's end, who has arrived where, and
//! where each was last.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::Communicator;
use crate::clock::{Clock, TELL_AFTER};
use crate::control::{Arrival, ControlLane, Received, Signal};
use crate::error::{Error, Interruption, LastSeen};
use crate::operation::Collective;
use crate::site::CallSite;

/// How long ranks wait for each other, and by which clock.
#[derive(Clone)]
pub struct Patience {
    pub timeout: Duration,
    pub clock: Arc<dyn Clock>,
}

/// One rank's end of the control lane, shared by all its communicators.
pub(super) struct Hub {
    /// The communicator that is aborted with the world.
    world: Arc<dyn Communicator>,
    lane: Arc<dyn ControlLane>,
    patience: Patience,
    known: Mutex<HubState>,
}

/// What has been received.
#[derive(Default)]
pub(super) struct HubState {
    /// The first failure that this rank has heard of.
    cause: Option<WorldEnd>,
    /// What this rank was in by then.
    interrupted: Option<Box<Interruption>>,
    is_passed_on: bool,
    /// By group, rank of the world and place in the order of the group.
    arrivals: BTreeMap<(u64, usize, u64), Arrival>,
    /// By rank of the world.
    ranks: Vec<Peer>,
}

/// Why the world ends.
#[derive(Clone)]
struct WorldEnd {
    rank: usize,
    reason: String,
    site: Option<CallSite>,
}

#[derive(Default, Clone)]
struct Peer {
    last: Option<(Collective, CallSite)>,
    /// For whom it has waited there for some time.
    waits_for: Vec<usize>,
    has_left: bool,
}

/// An operation that all members of a group meet in.
#[derive(Clone, Copy)]
pub(super) struct Meeting<'a> {
    pub(super) group: u64,
    pub(super) sequence: u64,
    /// The other members, as ranks of the world.
    pub(super) others: &'a [usize],
}

/// Why a wait ended without what it waited for.
pub(super) enum Halt {
    /// The world has ended. These ranks had not arrived.
    Failed { missing: Vec<usize> },
    /// These ranks have not arrived.
    TimedOut { waited: Duration, missing: Vec<usize>, last: Vec<LastSeen> },
    /// This rank has not arrived, and never will.
    Left(LastSeen),
}

impl Hub {
    pub(super) fn new(world: Arc<dyn Communicator>, lane: Arc<dyn ControlLane>, patience: Patience) -> Self {
        let known = HubState { ranks: vec![Peer::default(); lane.size()], ..HubState::default() };
        Hub { world, lane, patience, known: Mutex::new(known) }
    }

    /// Ends the data of this rank as soon as any rank has failed, also while this one waits for it, and tells the others
    /// where it does.
    pub(super) fn listen(self: &Arc<Self>) {
        let hub = Arc::downgrade(self);
        self.world.on_long_wait(Box::new(move |collective, site, missing| {
            hub.upgrade().iter().for_each(|hub| hub.tell_waiting((collective, site.into()), missing.to_vec()));
        }));
        let hub = Arc::downgrade(self);
        self.lane.on_failure(Box::new(move || hub.upgrade().iter().for_each(|hub| hub.hear())));
        self.hear();
    }

    /// Passes on what has come, if it is a failure.
    fn hear(&self) {
        let has_ended = self.known().cause.is_some();
        if has_ended {
            self.pass_on();
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.lane.rank()
    }

    pub(super) fn send(&self, to: usize, signal: &Signal) {
        self.lane.send(to, signal);
    }

    /// Ends the world in this rank's name, unless it has heard of another end.
    pub(super) fn fail(&self, reason: &str, site: Option<CallSite>) {
        self.known().cause.get_or_insert_with(|| WorldEnd { rank: self.rank(), reason: reason.to_owned(), site });
        self.pass_on();
    }

    /// What every operation gets once the world has ended; `error` is what this rank met with.
    pub(super) fn ended(&self, error: Error) -> Error {
        let Error::Aborted { by, reason, .. } = error else {
            self.fail(&error.to_string(), error.site());
            return error;
        };
        self.known().cause.get_or_insert(WorldEnd { rank: by, reason, site: None });
        self.pass_on();
        self.failure()
    }

    /// Tells all others of the world's end, if this rank has not. That it has only heard of it makes no difference: so
    /// nobody learns that a rank has left before it learns why, nor less than others if a rank dies while it tells them.
    fn pass_on(&self) {
        let mut known = self.known();
        let Some(WorldEnd { rank, reason, site }) = known.cause.clone() else { return };
        if std::mem::replace(&mut known.is_passed_on, true) {
            return;
        }
        drop(known);
        // First in place, where there is one: who hears of it over the lane then aborts nothing in its own name.
        self.world.abort(&reason);
        self.lane.send_all(&Signal::Failed { rank, reason, site });
    }

    /// An error once this rank has heard of a failure.
    pub(super) fn check(&self) -> Result<(), Error> {
        let failed = self.known().failure();
        failed.map_or(Ok(()), |error| Err(self.ended(error)))
    }

    /// Notes in what operation this rank heard of the world's end, if it is the first.
    pub(super) fn interrupted(&self, interruption: Interruption) {
        self.known().interrupted.get_or_insert_with(|| Box::new(interruption));
    }

    /// The failure that this rank met with, or heard of, before.
    pub(super) fn failure(&self) -> Error {
        self.known().failure().expect("a failure is noted before an operation fails by it")
    }

    /// The members that have not arrived, as far as has been received.
    pub(super) fn missing(&self, meeting: Meeting<'_>) -> Vec<usize> {
        self.known().missing(meeting)
    }

    /// Whether all members have arrived, as far as has been received.
    pub(super) fn have_arrived(&self, meeting: Meeting<'_>) -> bool {
        self.known().missing(meeting).is_empty()
    }

    /// Waits for all members. Who has arrived wins over a failure.
    pub(super) fn await_arrivals(&self, meeting: Meeting<'_>, doing: (Collective, CallSite)) -> Result<(), Halt> {
        let clock = &*self.patience.clock;
        let since = clock.now();
        let sleep = |until| self.lane.bell().sleep_until(clock, until, || self.known().outcome(meeting));
        if let Some(outcome) = sleep(since.saturating_add(self.patience.timeout / TELL_AFTER)) {
            return outcome;
        }
        let missing = self.known().missing(meeting);
        self.tell_waiting(doing.clone(), missing);
        let outcome = sleep(since.saturating_add(self.patience.timeout));
        if matches!(outcome, Some(Ok(()))) {
            // Or who misses this rank elsewhere would look for whom it waited for.
            self.tell_waiting(doing, Vec::new());
        }
        outcome.unwrap_or_else(|| {
            let (waited, known) = (clock.now() - since, self.known());
            let missing = known.missing(meeting);
            let last = known.last_of(missing.iter().copied());
            Err(Halt::TimedOut { waited, missing, last })
        })
    }

    /// Tells all ranks where this one waits, and for whom, or that it waits no longer.
    fn tell_waiting(&self, (collective, site): (Collective, CallSite), missing: Vec<usize>) {
        self.lane.send_all(&Signal::Waiting { collective, site, missing });
    }

    /// What the other members have come to, in the order of `others`; all have arrived.
    pub(super) fn take_arrivals(&self, meeting: Meeting<'_>) -> Vec<Arrival> {
        let mut known = self.known();
        let mut take = |rank| known.arrivals.remove(&(meeting.group, rank, meeting.sequence));
        meeting.others.iter().map(|&rank| take(rank).expect("it has been seen to arrive")).collect()
    }

    /// Where these ranks were when they were last heard of, and those that they wait for; first who waits for nobody.
    pub(super) fn last_of(&self, ranks: &[usize]) -> Vec<LastSeen> {
        self.known().last_of(ranks.iter().copied())
    }

    /// Forgets a group that this rank has left.
    pub(super) fn forget(&self, group: u64) {
        self.known().arrivals.retain(|&(other, ..), _| other != group);
    }

    /// What is known when all that has come is received.
    fn known(&self) -> MutexGuard<'_, HubState> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(received) = self.lane.receive() {
            known.learn(received);
        }
        known
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.pass_on();
    }
}

impl HubState {
    fn learn(&mut self, Received { from, signal }: Received) {
        match signal {
            Signal::Failed { rank, reason, site } => {
                self.cause.get_or_insert(WorldEnd { rank, reason, site });
            }
            Signal::Arrived(arrival) => {
                self.ranks[from].last = Some((arrival.collective, arrival.site.clone()));
                self.ranks[from].waits_for.clear();
                self.arrivals.insert((arrival.group, from, arrival.sequence), arrival);
            }
            Signal::Waiting { collective, site, missing } => {
                self.ranks[from].last = Some((collective, site));
                self.ranks[from].waits_for = missing;
            }
            Signal::Left => {
                self.ranks[from].has_left = true;
                self.ranks[from].waits_for.clear();
            }
            // For who made this rank, on a lane of its own.
            Signal::Told(_) => {}
        }
    }

    fn failure(&self) -> Option<Error> {
        self.cause.as_ref().map(|WorldEnd { rank, reason, .. }| Error::Aborted {
            by: *rank,
            reason: reason.clone(),
            interrupted: self.interrupted.clone(),
        })
    }

    fn missing(&self, meeting: Meeting<'_>) -> Vec<usize> {
        let is_missing = |rank: &usize| !self.arrivals.contains_key(&(meeting.group, *rank, meeting.sequence));
        meeting.others.iter().copied().filter(is_missing).collect()
    }

    /// How waiting for a meeting ends, if it ends now.
    fn outcome(&self, meeting: Meeting<'_>) -> Option<Result<(), Halt>> {
        let missing = self.missing(meeting);
        if missing.is_empty() {
            return Some(Ok(()));
        }
        if self.cause.is_some() {
            return Some(Err(Halt::Failed { missing }));
        }
        let gone = missing.into_iter().find(|&rank| self.ranks[rank].has_left);
        gone.map(|rank| Err(Halt::Left(self.seen(rank))))
    }

    /// Of these ranks, and of those that they wait for in turn; first who waits for nobody.
    fn last_of(&self, ranks: impl IntoIterator<Item = usize>) -> Vec<LastSeen> {
        let mut all: Vec<usize> = ranks.into_iter().collect();
        let mut seen = Vec::new();
        while let Some(&rank) = all.get(seen.len()) {
            let last = self.seen(rank);
            let is_unknown = |other: &usize| !all.contains(other) && *other < self.ranks.len();
            let unknown: Vec<usize> = last.waits_for.iter().copied().filter(is_unknown).collect();
            all.extend(unknown);
            seen.push(last);
        }
        seen.sort_by_key(|seen| !seen.waits_for.is_empty());
        seen
    }

    fn seen(&self, rank: usize) -> LastSeen {
        let Peer { last, waits_for, .. } = self.ranks[rank].clone();
        LastSeen { rank, at: last, waits_for }
    }
}
