//! One rank's way through the operations of one group: what it has announced, what has been agreed on and begun, what is
//! finished and not yet fetched.
//!
//! Operations are brought to their end in the order in which they were started, whichever is awaited first.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::hub::{Halt, Hub, Meeting};
use crate::Communicator;
use crate::control::{Arrival, Signal};
use crate::digest::digest;
use crate::error::{Attendance, Error, Interruption, LastSeen, Party, left_in_flight};
use crate::operation::{Completed, Operation, Request};
use crate::pending::Pending;
use crate::validate::validate;

/// One rank's membership in a group.
pub(super) struct Desk {
    hub: Arc<Hub>,
    inner: Arc<dyn Communicator>,
    /// What members call the group.
    group: u64,
    /// Rank of the world of each rank of the group.
    members: Vec<usize>,
    /// `members` without this rank.
    others: Vec<usize>,
    start: Begins,
    agenda: Mutex<Agenda>,
}

/// Operations `0..finished` are over; `open` are the ones that follow.
#[derive(Default)]
struct Agenda {
    finished: u64,
    open: VecDeque<Open>,
    /// An operation failed; its successors must not be attempted.
    has_failed: bool,
    /// Finished operations nobody has fetched yet.
    results: BTreeMap<u64, Completed>,
    /// Operations in flight whose result nobody wants.
    abandoned: BTreeSet<u64>,
}

/// When operations begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begins {
    /// When the members agree.
    Agreed,
    /// At once; whether the members agree is seen before anybody gets the result.
    AtOnce,
}

/// What the members have been told of an operation.
struct Announcement {
    site: &'static Location<'static>,
    /// But for the counts.
    arrival: Arrival,
    /// By rank of the group: elements that an all-to-all sends to it, and expects from it.
    counts: Vec<(u64, u64)>,
}

/// An operation in flight.
enum Open {
    /// The members have been told.
    Announced(Announcement, Request),
    /// It has begun, and the members need not agree.
    Ahead(Announcement, Pending),
    /// The members agree.
    Begun(Pending),
    /// They do not, or it could not be begun.
    Failed(Error),
}

impl Desk {
    /// The membership in `group` that `inner` is; to be made once for each.
    pub(super) fn new(
        hub: Arc<Hub>,
        inner: Arc<dyn Communicator>,
        (group, members): (u64, Vec<usize>),
        start: Begins,
    ) -> Self {
        let others = members.iter().copied().filter(|&rank| rank != hub.rank()).collect();
        Desk { hub, inner, group, members, others, start, agenda: Mutex::default() }
    }

    /// The membership in a group that was split off.
    pub(super) fn child(&self, inner: Arc<dyn Communicator>, group: u64) -> Result<Desk, Error> {
        let members = inner.all_gather_u64(&[self.hub.rank() as u64]);
        let members = members.map_err(|error| self.hub.ended(self.told(error, inner.name())))?;
        let members = members.into_iter().map(|rank| rank as usize).collect();
        Ok(Desk::new(self.hub.clone(), inner, (group, members), self.start))
    }

    pub(super) fn abort(&self, reason: &str) {
        self.hub.fail(reason, None);
    }

    /// Announces `request`, and begins what has been agreed on; returns its place in the order. `name` is what errors
    /// call the communicator.
    pub(super) fn start(&self, request: Request, name: &str) -> Result<u64, Error> {
        let mut agenda = self.agenda();
        let (announcement, index) = self.announce(&mut agenda, &request, name)?;
        let open = match self.start {
            Begins::Agreed => Open::Announced(announcement, request),
            Begins::AtOnce => {
                let pending = self.inner.start(request).map_err(|error| {
                    self.heard_in(&error, &announcement, self.hub.missing(self.meeting(index)), name);
                    self.fail(&mut agenda, error)
                })?;
                Open::Ahead(announcement, pending)
            }
        };
        agenda.open.push_back(open);
        for place in 0..agenda.open.len() {
            if matches!(agenda.open[place], Open::Announced(..)) {
                let sequence = agenda.finished + place as u64;
                if agenda.has_failed || !self.hub.have_arrived(self.meeting(sequence)) {
                    break;
                }
                self.begin(&mut agenda, place, name);
            }
        }
        Ok(index)
    }

    /// Finishes operation `index` and all before it; returns its buffers. To be called once for each operation.
    pub(super) fn wait(&self, index: u64, name: &str) -> Result<Completed, Error> {
        let mut agenda = self.agenda();
        self.finish_before(&mut agenda, index, name)?;
        if agenda.finished > index {
            return Ok(agenda.results.remove(&index).expect("a finished operation is fetched once"));
        }
        self.complete(&mut agenda, name)
    }

    /// Gives up the result of operation `index`.
    pub(super) fn abandon(&self, index: u64) {
        let mut agenda = self.agenda();
        if agenda.finished > index {
            agenda.results.remove(&index);
        } else {
            agenda.abandoned.insert(index);
        }
    }

    /// Agrees on a split, then does it; returns what comes of it, and what its members call it.
    pub(super) fn split<T>(
        &self,
        name: &str,
        color: u64,
        split: impl FnOnce() -> Result<T, Error>,
    ) -> Result<(T, u64), Error> {
        let size = self.members.len();
        let mut agenda = self.agenda();
        // What thread ranks exchange to split, so that a disagreement is told in the same words.
        let wishes = Request::all_gather(vec![0u64; 2], vec![0u64; 2 * size], vec![2; size]);
        let (announcement, index) = self.announce(&mut agenda, &wishes, name)?;
        self.finish_before(&mut agenda, index, name)?;
        let split = self.agree(&announcement, name).and_then(|()| split().map_err(|error| self.told(error, name)));
        let split = split.map_err(|error| self.fail(&mut agenda, error))?;
        agenda.finished += 1;
        Ok((split, digest([self.group, index, color])))
    }

    fn agenda(&self) -> MutexGuard<'_, Agenda> {
        self.agenda.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn meeting(&self, sequence: u64) -> Meeting<'_> {
        Meeting { group: self.group, sequence, others: &self.others }
    }

    /// Tells the members what this rank has come to.
    fn announce(&self, agenda: &mut Agenda, request: &Request, name: &str) -> Result<(Announcement, u64), Error> {
        let sequence = agenda.finished + agenda.open.len() as u64;
        if self.hub.check().is_err() {
            let missing = self.hub.missing(self.meeting(sequence));
            self.interrupted((&request.operation.to_string(), request.site), missing, name);
            return Err(self.hub.failure());
        }
        let (rank, size) = (self.inner.rank(), self.members.len());
        validate(request, rank, size, self.hub.rank()).map_err(|error| self.fail(agenda, error))?;
        let announcement = Announcement::of(request, (self.group, sequence), size);
        for (place, &member) in self.members.iter().enumerate().filter(|&(place, _)| place != rank) {
            self.hub.send(member, &Signal::Arrived(announcement.to(place)));
        }
        Ok((announcement, sequence))
    }

    /// Finishes the operations before `index`, and keeps the results that anybody may ask for.
    fn finish_before(&self, agenda: &mut Agenda, index: u64, name: &str) -> Result<(), Error> {
        while agenda.finished < index {
            let place = agenda.finished;
            let completed = self.complete(agenda, name)?;
            if !agenda.abandoned.remove(&place) {
                agenda.results.insert(place, completed);
            }
        }
        Ok(())
    }

    /// Finishes the oldest operation in flight.
    fn complete(&self, agenda: &mut Agenda, name: &str) -> Result<Completed, Error> {
        if !agenda.has_failed && matches!(agenda.open.front(), Some(Open::Announced(..))) {
            self.begin(agenda, 0, name);
        }
        let completed = match agenda.open.pop_front() {
            Some(Open::Begun(pending)) if !agenda.has_failed => {
                pending.wait().map_err(|error| self.fail(agenda, error))?
            }
            Some(Open::Ahead(announcement, pending)) if !agenda.has_failed => {
                let agreed = self.agree(&announcement, name);
                let completed = agreed.and_then(|()| {
                    pending.wait().map_err(|error| {
                        self.heard_in(&error, &announcement, Vec::new(), name);
                        self.told(error, name)
                    })
                });
                completed.map_err(|error| self.fail(agenda, error))?
            }
            Some(Open::Failed(error)) => return Err(error),
            _ => return Err(self.hub.failure()),
        };
        agenda.finished += 1;
        Ok(completed)
    }

    /// An error of the data's own communicator, in the name that this one goes by, and with what is known of ranks that are
    /// missing.
    fn told(&self, error: Error, name: &str) -> Error {
        let communicator = name.to_owned();
        match error {
            Error::Timeout { operation, site, waited, missing, mut attendance, .. } => {
                attendance.last = self.hub.last_of(&missing);
                let missing = self.waited_for(missing, &attendance.last);
                Error::Timeout { communicator, operation, site, waited, missing, attendance }
            }
            Error::Transport { operation, site, detail, .. } => {
                Error::Transport { communicator, operation, site, detail }
            }
            error => error,
        }
    }

    /// Waits until the members agree on the operation at `place` of those in flight, and starts it. It is awaited before
    /// anybody hears of a failure.
    fn begin(&self, agenda: &mut Agenda, place: usize, name: &str) {
        let Some(Open::Announced(announcement, request)) = agenda.open.remove(place) else {
            unreachable!("called for what is announced")
        };
        let agreed = self.agree(&announcement, name);
        let begun = agreed.and_then(|()| self.inner.start(request)).map_err(|error| self.fail(agenda, error));
        agenda.open.insert(place, begun.map_or_else(Open::Failed, Open::Begun));
    }

    /// Notes a failure, and tells the world of it.
    fn fail(&self, agenda: &mut Agenda, error: Error) -> Error {
        agenda.has_failed = true;
        self.hub.ended(error)
    }

    /// Waits for the members, and compares what they have come to with `request`.
    fn agree(&self, announcement: &Announcement, name: &str) -> Result<(), Error> {
        let meeting = self.meeting(announcement.arrival.sequence);
        let doing = (announcement.arrival.collective, announcement.site.into());
        self.hub.await_arrivals(meeting, doing).map_err(|halt| self.halted(halt, announcement, name))?;
        let mut arrivals = self.hub.take_arrivals(meeting);
        let own = self.inner.rank();
        arrivals.insert(own, announcement.to(own));
        self.compare(&arrivals, announcement, name)
    }

    /// The error of a wait that ended without what it waited for.
    fn halted(&self, halt: Halt, announcement: &Announcement, name: &str) -> Error {
        let (operation, site) = (announcement.arrival.operation.clone(), announcement.site);
        match halt {
            Halt::Failed { missing } => {
                self.interrupted((&operation, site), missing, name);
                self.hub.failure()
            }
            Halt::TimedOut { waited, missing, last } => {
                let attendance = Box::new(self.attendance(&missing, last));
                let (communicator, missing) = (name.to_owned(), self.waited_for(missing, &attendance.last));
                Error::Timeout { communicator, operation, site, waited, missing, attendance }
            }
            Halt::Left(last) => {
                let reason = format!(
                    "it has left the world ({last}), but communicator '{name}' needs it for {operation} at {site}; every \
                     rank must issue the same collectives in the same order"
                );
                Error::aborted(last.rank, reason)
            }
        }
    }

    /// Notes an operation in which this rank heard of the world's end, if that is the `error`, and who had not come to it.
    fn heard_in(&self, error: &Error, announcement: &Announcement, missing: Vec<usize>, name: &str) {
        if matches!(error, Error::Aborted { .. }) {
            self.interrupted((&announcement.arrival.operation, announcement.site), missing, name);
        }
    }

    /// Notes in what this rank heard of the world's end, and who had not come to it.
    fn interrupted(&self, (operation, site): (&str, &'static Location<'static>), missing: Vec<usize>, name: &str) {
        let attendance = self.attendance(&missing, self.hub.last_of(&missing));
        let (communicator, operation) = (name.to_owned(), operation.to_owned());
        self.hub.interrupted(Interruption { communicator, operation, site, missing, attendance });
    }

    /// Of ranks that have not come, and of those that they wait for, who waits for nobody: one that waits elsewhere for
    /// another is not to blame. All that have not come, if each waits for another, as where all wait in a circle.
    fn waited_for(&self, missing: Vec<usize>, last: &[LastSeen]) -> Vec<usize> {
        let is_to_blame = |seen: &&LastSeen| seen.waits_for.is_empty() && seen.rank != self.hub.rank();
        let mut to_blame: Vec<usize> = last.iter().filter(is_to_blame).map(|seen| seen.rank).collect();
        to_blame.sort_unstable();
        if to_blame.is_empty() { missing } else { to_blame }
    }

    fn attendance(&self, missing: &[usize], last: Vec<LastSeen>) -> Attendance {
        let arrived = self.members.iter().copied().filter(|rank| !missing.contains(rank)).collect();
        Attendance { arrived, last }
    }

    /// Can these operations, of all ranks of the group, meet? In the order and in the words of the rendezvous.
    fn compare(&self, arrivals: &[Arrival], announcement: &Announcement, name: &str) -> Result<(), Error> {
        let own = self.inner.rank();
        let party = |rank: usize| {
            let Arrival { operation, site, .. } = arrivals[rank].clone();
            Box::new(Party { rank: self.members[rank], operation, site })
        };
        let deviates = |rank: &usize| arrivals[*rank].digest != arrivals[0].digest;
        if let Some(rank) = (0..arrivals.len()).find(deviates) {
            let (communicator, first, second) = (name.to_owned(), party(0), party(rank));
            return Err(Error::Mismatch { communicator, index: arrivals[0].sequence, first, second });
        }
        for (peer, arrival) in arrivals.iter().enumerate() {
            let (sent, expected) = announcement.counts[peer];
            let pairs = [(peer, own, arrival.sent, expected), (own, peer, sent, arrival.expected)];
            if let Some((sender, receiver, sent, expected)) = pairs.into_iter().find(|(.., a, b)| a != b) {
                let (communicator, receiver, sender) = (name.to_owned(), party(receiver), party(sender));
                let (sent, expected) = (sent as usize, expected as usize);
                return Err(Error::PeerCounts { communicator, receiver, sender, expected, sent });
            }
        }
        Ok(())
    }
}

impl Drop for Desk {
    /// A rank that leaves operations unfinished would leave its peers waiting: tell them instead.
    fn drop(&mut self) {
        let agenda = self.agenda();
        let (left, has_failed) = (agenda.open.len() as u64, agenda.has_failed);
        drop(agenda);
        if left > 0 && !has_failed {
            self.abort(&left_in_flight(left));
        }
        self.hub.forget(self.group);
    }
}

impl Announcement {
    /// Of an operation of a group of `size`.
    fn of(request: &Request, (group, sequence): (u64, u64), size: usize) -> Announcement {
        let (operation, site) = (&request.operation, request.site);
        let (collective, digest) = (operation.collective(), operation.digest());
        let counts = (0..size).map(|peer| counts(operation, peer)).collect();
        let operation = operation.to_string();
        let arrival =
            Arrival { group, sequence, collective, digest, sent: 0, expected: 0, operation, site: site.into() };
        Announcement { site, arrival, counts }
    }

    /// As it is told to rank `peer` of the group.
    fn to(&self, peer: usize) -> Arrival {
        let (sent, expected) = self.counts[peer];
        Arrival { sent, expected, ..self.arrival.clone() }
    }
}

/// Elements that an all-to-all sends to rank `peer`, and expects from it.
fn counts(operation: &Operation, peer: usize) -> (u64, u64) {
    match operation {
        Operation::AllToAll { send_counts, recv_counts, .. } => (send_counts[peer] as u64, recv_counts[peer] as u64),
        _ => (0, 0),
    }
}
