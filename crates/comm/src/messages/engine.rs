//! What one rank has under way on all its lanes, and who moves it on: whoever waits, and between kernels a thread of the
//! engine's own, so that operations progress while nobody waits for them.

use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::post::PointToPoint;
use super::round::{LaneAddress, MessageRound, StagesOpen};
use crate::OnLongWait;
use crate::clock::{Clock, LOOK_EVERY, TELL_AFTER};
use crate::error::{Attendance, Error};
use crate::operation::{Collective, Completed, Request};

/// One rank's engine.
pub(super) struct MessageEngine<P: PointToPoint> {
    transit: Mutex<InTransit<P>>,
    /// Told when something is under way that was not, and at the end.
    news: Condvar,
    rank: usize,
    timeout: Duration,
    clock: Arc<dyn Clock>,
    /// Why the world ended, as this rank knows, and by whom.
    ended: OnceLock<(usize, String)>,
    /// Is told of operations that are awaited for long.
    on_long_wait: OnceLock<OnLongWait>,
}

struct InTransit<P: PointToPoint> {
    post: P,
    /// By number.
    lanes: BTreeMap<u32, Rounds<P::Ticket>>,
    /// No lane of this rank has this number or a higher one.
    next_lane: u32,
    is_closing: bool,
}

/// What is under way on a lane.
struct Rounds<T> {
    /// Rank of the world of each rank of the group.
    members: Vec<usize>,
    me: usize,
    started: u64,
    /// By place in the order.
    open: BTreeMap<u64, MessageRound<T>>,
    /// Parts of messages that have left or come.
    moved: u64,
}

impl<P: PointToPoint> MessageEngine<P> {
    pub(super) fn new(post: P, timeout: Duration, clock: Arc<dyn Clock>) -> Arc<Self> {
        let rank = post.rank();
        let transit = InTransit { post, lanes: BTreeMap::new(), next_lane: 0, is_closing: false };
        Arc::new(MessageEngine {
            transit: Mutex::new(transit),
            news: Condvar::new(),
            rank,
            timeout,
            clock,
            ended: OnceLock::new(),
            on_long_wait: OnceLock::new(),
        })
    }

    /// The thread that moves on what nobody waits for, until [`MessageEngine::close`].
    pub(super) fn mover(self: &Arc<Self>) -> JoinHandle<()> {
        let engine = self.clone();
        let thread = thread::Builder::new().name(format!("messages of rank {}", self.rank));
        thread.spawn(move || engine.move_on()).unwrap_or_else(|error| panic!("cannot start a thread: {error}"))
    }

    fn move_on(&self) {
        loop {
            let idle = |transit: &mut InTransit<P>| !transit.is_closing && transit.lanes.values().all(Rounds::is_idle);
            let mut transit = self.news.wait_while(self.transit(), idle).unwrap_or_else(PoisonError::into_inner);
            if transit.is_closing {
                return;
            }
            transit.progress();
            drop(transit);
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Has `tell` called for operations that are awaited for long.
    pub(super) fn on_long_wait(&self, tell: OnLongWait) {
        // Only the first is kept.
        let _ = self.on_long_wait.set(tell);
    }

    /// Moves on what is under way.
    pub(super) fn progress(&self) {
        self.transit().progress();
    }

    /// Ends the mover.
    pub(super) fn close(&self) {
        self.transit().is_closing = true;
        self.news.notify_all();
    }

    /// Opens the lane of all ranks: its number, this rank, and how many there are.
    pub(super) fn world(&self) -> (u32, usize, usize) {
        let mut transit = self.transit();
        let (size, me) = (transit.post.size(), self.rank);
        (transit.open_lane(0, (0..size).collect(), me), me, size)
    }

    /// The number that a lane of this rank may have next.
    pub(super) fn next_lane(&self) -> u32 {
        self.transit().next_lane
    }

    /// A lane of these ranks of the world, of which this one is the `me`-th.
    pub(super) fn open_lane(&self, number: u32, members: Vec<usize>, me: usize) -> Result<u32, String> {
        let mut transit = self.transit();
        if number > (transit.post.tag_max() - 1) / 2 {
            return Err(format!("{number} groups have been split off, more than messages can be told apart of"));
        }
        Ok(transit.open_lane(number, members, me))
    }

    /// Leaves a lane; how many of its operations are left unfinished.
    pub(super) fn leave(&self, lane: u32) -> usize {
        let Some(rounds) = self.transit().lanes.remove(&lane) else { return 0 };
        let left = rounds.open.values().filter(|round| !round.is_done()).count();
        rounds.open.into_values().for_each(MessageRound::forsake);
        left
    }

    pub(super) fn member(&self, lane: u32, rank: usize) -> usize {
        self.transit().lanes[&lane].members[rank]
    }

    /// Starts a validated operation; its place in the order of its lane.
    pub(super) fn start(&self, lane: u32, request: Request, name: &str) -> Result<u64, Error> {
        self.check()?;
        let (operation, site) = (request.operation.to_string(), request.site);
        let started = self.transit().start(lane, request);
        self.news.notify_all();
        started.map_err(|detail| self.fail(Error::Transport { communicator: name.to_owned(), operation, site, detail }))
    }

    /// Waits for an operation; returns its buffers. To be called once for each. As long as parts of messages come and go the
    /// others live, however long the whole takes.
    pub(super) fn wait(&self, lane: u32, index: u64, name: &str) -> Result<Completed, Error> {
        let (mut since, mut told, mut moved) = (self.clock.now(), None, 0);
        for looks in 0.. {
            let mut transit = self.transit();
            transit.progress();
            if let Some(round) = transit.take_done(lane, index) {
                drop(transit);
                if let (Some(tell), Some((collective, site))) = (self.on_long_wait.get(), told) {
                    tell(collective, site, &[]);
                }
                return Ok(round.operation.into_completed());
            }
            self.check()?;
            if let Some(detail) = transit.lanes[&lane].open[&index].failed.clone() {
                let (operation, site) = transit.what(lane, index);
                drop(transit);
                return Err(self.fail(Error::Transport { communicator: name.to_owned(), operation, site, detail }));
            }
            let moved_before = std::mem::replace(&mut moved, transit.moved());
            if moved != moved_before {
                since = self.clock.now();
            }
            let waited = self.clock.now() - since;
            if waited >= self.timeout {
                let (operation, site) = transit.what(lane, index);
                let (missing, arrived) = transit.missing(lane, index);
                drop(transit);
                let attendance = Box::new(Attendance { arrived, last: Vec::new() });
                let communicator = name.to_owned();
                return Err(self.fail(Error::Timeout { communicator, operation, site, waited, missing, attendance }));
            }
            let tells = told.is_none() && waited >= self.timeout / TELL_AFTER;
            let waits = tells.then(|| transit.waits(lane, index));
            drop(transit);
            if let Some((collective, site, missing)) = waits {
                self.on_long_wait.get().into_iter().for_each(|tell| tell(collective, site, &missing));
                told = Some((collective, site));
            }
            let next = if told.is_some() { self.timeout } else { self.timeout / TELL_AFTER };
            self.clock.linger(looks, since.saturating_add(next));
        }
        unreachable!("looking ends with a return")
    }

    /// Gives up the result of an operation.
    pub(super) fn abandon(&self, lane: u32, index: u64) {
        let mut transit = self.transit();
        if let Some(rounds) = transit.lanes.get_mut(&lane) {
            rounds.open.entry(index).and_modify(|round| round.is_abandoned = true);
            rounds.forget_abandoned();
        }
    }

    /// Ends this rank's world: no message tells the others.
    pub(super) fn abort(&self, reason: &str) {
        // Only the first reason is kept.
        let _ = self.ended.set((self.rank, reason.to_owned()));
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        let ended = self.ended.get().cloned();
        ended.map_or(Ok(()), |(by, reason)| Err(Error::aborted(by, reason)))
    }

    /// Ends the world because of an error, which is returned.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.abort(&error.to_string());
        error
    }

    fn transit(&self) -> MutexGuard<'_, InTransit<P>> {
        self.transit.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: PointToPoint> InTransit<P> {
    fn open_lane(&mut self, number: u32, members: Vec<usize>, me: usize) -> u32 {
        self.next_lane = self.next_lane.max(number + 1);
        self.lanes.insert(number, Rounds { members, me, started: 0, open: BTreeMap::new(), moved: 0 });
        number
    }

    fn start(&mut self, lane: u32, request: Request) -> Result<u64, String> {
        let rounds = self.lanes.get_mut(&lane).expect("a lane is left by its last communicator");
        let index = rounds.started;
        let address = LaneAddress { members: &rounds.members, tag: 2 * lane, me: rounds.me };
        let open = rounds.open.values().fold(StagesOpen::BOTH, |open, round| round.leaves_open(open));
        let round = MessageRound::begin(request, &mut self.post, address, open)?;
        rounds.open.insert(index, round);
        rounds.started += 1;
        Ok(index)
    }

    /// Moves on what is under way on all lanes: other ranks may wait for another than this one.
    fn progress(&mut self) {
        self.lanes.iter_mut().for_each(|(lane, rounds)| rounds.progress(2 * lane, &mut self.post));
    }

    /// Parts of messages that have left or come, on all lanes that are open.
    fn moved(&self) -> u64 {
        self.lanes.values().map(|rounds| rounds.moved).sum()
    }

    fn take_done(&mut self, lane: u32, index: u64) -> Option<MessageRound<P::Ticket>> {
        let open = &mut self.lanes.get_mut(&lane).expect("as in start").open;
        open.get(&index).is_some_and(MessageRound::is_done).then(|| open.remove(&index).expect("seen above"))
    }

    /// An operation under way, as text, and the line that asked for it.
    fn what(&self, lane: u32, index: u64) -> (String, &'static Location<'static>) {
        let round = &self.lanes[&lane].open[&index];
        (round.operation.to_string(), round.site)
    }

    /// Where an operation waits, and for which ranks of the world.
    fn waits(&self, lane: u32, index: u64) -> (Collective, &'static Location<'static>, Vec<usize>) {
        let round = &self.lanes[&lane].open[&index];
        (round.operation.collective(), round.site, self.missing(lane, index).0)
    }

    /// Ranks of the world that an operation waits for, and the others of its group.
    fn missing(&self, lane: u32, index: u64) -> (Vec<usize>, Vec<usize>) {
        let rounds = &self.lanes[&lane];
        let awaited = rounds.open[&index].awaited();
        let is_awaited = |rank: &usize| awaited.contains(rank);
        let (missing, arrived): (Vec<usize>, Vec<usize>) = (0..rounds.members.len()).partition(is_awaited);
        let of_world = |ranks: Vec<usize>| ranks.into_iter().map(|rank| rounds.members[rank]).collect();
        (of_world(missing), of_world(arrived))
    }
}

impl<T> Rounds<T> {
    fn is_idle(&self) -> bool {
        self.open.values().all(|round| round.is_done() || round.failed.is_some())
    }

    fn progress<P: PointToPoint<Ticket = T>>(&mut self, tag: u32, post: &mut P) {
        let address = LaneAddress { members: &self.members, tag, me: self.me };
        // The messages of a stage start in the order of operations, on every rank: so they meet.
        let mut open = StagesOpen::BOTH;
        for round in self.open.values_mut().filter(|round| !round.is_done()) {
            open = round.go_on(post, address, open);
            self.moved += std::mem::take(&mut round.moved);
        }
        self.forget_abandoned();
    }

    fn forget_abandoned(&mut self) {
        self.open.retain(|_, round| !(round.is_abandoned && round.is_done()));
    }
}

impl<P: PointToPoint> Drop for InTransit<P> {
    /// Whoever carries messages may still write into their memory.
    fn drop(&mut self) {
        let lanes = std::mem::take(&mut self.lanes);
        lanes.into_values().flat_map(|rounds| rounds.open.into_values()).for_each(MessageRound::forsake);
    }
}
