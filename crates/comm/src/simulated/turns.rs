//! Who runs next. The rank that has the turn chooses its successor, and brings what arrives before.

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::{MishapKind, TransportFlaw, WorldScript};
use crate::digest::mix;

/// What the choice of a successor takes.
const TICK: Duration = Duration::from_micros(1);

/// Who has not ended by then waits for ever.
const TIME_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// One message in so many is lost by [`TransportFlaw::Loss`].
const LOST_IN: u64 = 500;

/// The turns of a world.
pub(super) struct Turns {
    script: WorldScript,
    state: Mutex<TurnState>,
    /// By rank: told when the turn is its own, or nobody's for ever.
    calls: Vec<Condvar>,
}

struct TurnState {
    now: Duration,
    draws: u64,
    running: Option<usize>,
    ranks: Vec<Player>,
    /// What is under way, by the time at which it arrives and the order in which it was sent.
    parcels: BTreeMap<(Duration, u64), Parcel>,
    sent: u64,
    /// When the last of each channel arrives.
    last: BTreeMap<Channel, Duration>,
    /// What arrives when a rank has died.
    closings: Vec<(Channel, Deed)>,
    had_mishap: bool,
    stuck: Option<Stuck>,
}

/// One rank's part in the order.
struct Player {
    wish: Wish,
    /// When its wish is granted, if nothing arrives before.
    until: Duration,
    has_news: bool,
    turns: u64,
    still_until: Duration,
    is_dead: bool,
    /// What moves its operations on.
    mover: Option<Nudge>,
}

struct Parcel {
    channel: Channel,
    deed: Deed,
}

/// What brings a parcel.
pub(super) type Deed = Box<dyn FnOnce() + Send>;

type Nudge = Arc<dyn Fn() + Send + Sync>;

/// Where things arrive in the order in which they were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Channel {
    Messages { from: usize, to: usize, tag: u32 },
    Signals { number: usize, from: usize, to: usize },
}

/// For what a rank gives its turn away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    /// The world does not know it yet.
    Entrance,
    /// Some time for its own work.
    Work,
    /// To be called when something has arrived, or at this time.
    News(Duration),
    /// It wants nothing any more.
    Nothing,
}

/// Why a rank does not go on: it unwinds, and does nothing in the world any more.
#[derive(Debug)]
pub(super) struct Gone;

/// Ranks that wait for ever.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck {
    pub time: Duration,
    pub ranks: Vec<usize>,
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ranks {:?} wait for ever ({} s of the world's time)", self.ranks, self.time.as_secs())
    }
}

impl Turns {
    pub(super) fn new(size: usize, script: WorldScript) -> Arc<Turns> {
        assert!(size > 0, "a world has at least one rank");
        let player = |_| Player {
            wish: Wish::Entrance,
            until: Duration::MAX,
            has_news: false,
            turns: 0,
            still_until: Duration::ZERO,
            is_dead: false,
            mover: None,
        };
        let state = TurnState {
            now: Duration::ZERO,
            draws: 0,
            running: None,
            ranks: (0..size).map(player).collect(),
            parcels: BTreeMap::new(),
            sent: 0,
            last: BTreeMap::new(),
            closings: Vec::new(),
            had_mishap: false,
            stuck: None,
        };
        Arc::new(Turns { script, state: Mutex::new(state), calls: (0..size).map(|_| Condvar::new()).collect() })
    }

    pub(super) fn size(&self) -> usize {
        self.calls.len()
    }

    /// All ordered pairs of ranks.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let size = self.size();
        (0..size).flat_map(move |from| (0..size).filter(move |&to| to != from).map(move |to| (from, to)))
    }

    pub(super) fn now(&self) -> Duration {
        self.state().now
    }

    pub(super) fn counts(&self) -> Vec<u64> {
        self.state().ranks.iter().map(|player| player.turns).collect()
    }

    pub(super) fn had_mishap(&self) -> bool {
        self.state().had_mishap
    }

    pub(super) fn stuck(&self) -> Option<Stuck> {
        self.state().stuck.clone()
    }

    /// What arrives by `channel` when its sender has died.
    pub(super) fn on_death(&self, channel: Channel, deed: Deed) {
        self.state().closings.push((channel, deed));
    }

    /// Sends something on its way. The dead send nothing.
    pub(super) fn send(&self, channel: Channel, deed: Deed) {
        self.state().send(channel, deed, &self.script);
    }

    /// A rank's thread has begun; returns at its first turn.
    pub(super) fn enter(&self, rank: usize, mover: Box<dyn Fn() + Send + Sync>) {
        let mut state = self.state();
        state.ranks[rank].mover = Some(mover.into());
        // Nothing is drawn: threads begin in any order.
        state.wish(rank, Wish::Work, Duration::ZERO);
        let are_all_here = state.ranks.iter().all(|player| player.wish != Wish::Entrance);
        drop(state);
        if are_all_here {
            self.hand_over();
        }
        self.await_turn(rank);
    }

    /// A rank's thread ends.
    pub(super) fn leave(&self, rank: usize) {
        self.state().wish(rank, Wish::Nothing, Duration::MAX);
        self.hand_over();
    }

    /// Ends a rank that has died and does not know it yet.
    pub(super) fn check(&self, rank: usize) {
        if !thread::panicking() && self.is_dead(rank) {
            resume_unwind(Box::new(Gone));
        }
    }

    pub(super) fn is_dead(&self, rank: usize) -> bool {
        self.state().ranks[rank].is_dead
    }

    /// Gives the turn away until `wish` is granted.
    pub(super) fn pause(&self, rank: usize, wish: Wish) {
        // Who unwinds has no wish.
        if thread::panicking() {
            return;
        }
        let mut state = self.state();
        if state.ranks[rank].is_dead || state.stuck.is_some() {
            drop(state);
            resume_unwind(Box::new(Gone));
        }
        let until = match wish {
            Wish::News(deadline) => deadline,
            _ => state.work(self.script.seed),
        };
        state.wish(rank, wish, until);
        if state.meet_mishap(rank, &self.script) {
            drop(state);
            resume_unwind(Box::new(Gone));
        }
        drop(state);
        self.hand_over();
        self.await_turn(rank);
    }

    fn await_turn(&self, rank: usize) {
        let is_others = |state: &mut TurnState| state.running != Some(rank) && state.stuck.is_none();
        let state = self.calls[rank].wait_while(self.state(), is_others).unwrap_or_else(PoisonError::into_inner);
        if state.stuck.is_some() && state.running != Some(rank) {
            drop(state);
            resume_unwind(Box::new(Gone));
        }
    }

    /// Lets time go on, brings what arrives, and calls a rank that can go on.
    fn hand_over(&self) {
        loop {
            let mut state = self.state();
            if state.stuck.is_some() {
                return;
            }
            if let Some(deed) = state.arrival() {
                drop(state);
                deed();
                continue;
            }
            let ready = state.ready();
            if ready.is_empty() {
                match state.next_time() {
                    Some(time) if time < TIME_MAX => state.now = time,
                    _ => return self.give_up(state),
                }
                continue;
            }
            state.now += TICK;
            if let Some(mover) = state.mover(&self.script) {
                drop(state);
                mover();
                continue;
            }
            let next = ready[state.draw(self.script.seed) as usize % ready.len()];
            state.ranks[next].has_news = false;
            state.ranks[next].turns += 1;
            let is_called = state.running.replace(next) != Some(next);
            // The thread that is woken needs the lock first.
            drop(state);
            if is_called {
                self.calls[next].notify_all();
            }
            return;
        }
    }

    /// Nobody can go on: whoever waits waits for ever, if anybody does.
    fn give_up(&self, mut state: MutexGuard<'_, TurnState>) {
        let waits = |rank: &usize| state.ranks[*rank].wish != Wish::Nothing;
        let ranks: Vec<usize> = (0..self.size()).filter(waits).collect();
        state.running = None;
        if !ranks.is_empty() {
            state.stuck = Some(Stuck { time: state.now, ranks });
        }
        self.calls.iter().for_each(Condvar::notify_all);
    }

    fn state(&self) -> MutexGuard<'_, TurnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TurnState {
    fn draw(&mut self, seed: u64) -> u64 {
        self.draws += 1;
        mix(mix(seed) ^ self.draws)
    }

    /// A time of many sizes: mostly microseconds, seldom nearly a second.
    fn draw_time(&mut self, seed: u64) -> Duration {
        let draw = self.draw(seed);
        let most_us = match draw % 64 {
            0 => 900_000,
            1..4 => 10_000,
            _ => 50,
        };
        Duration::from_micros(1 + (draw >> 8) % most_us)
    }

    /// When a rank has done some work.
    fn work(&mut self, seed: u64) -> Duration {
        self.now + self.draw_time(seed)
    }

    fn wish(&mut self, rank: usize, wish: Wish, until: Duration) {
        (self.ranks[rank].wish, self.ranks[rank].until) = (wish, until);
    }

    /// Whether the rank has died in this turn.
    fn meet_mishap(&mut self, rank: usize, script: &WorldScript) -> bool {
        let is_now = |at_turn: u64| self.ranks[rank].turns == at_turn + 1;
        let Some(mishap) = script.mishap.filter(|mishap| mishap.rank == rank && is_now(mishap.at_turn)) else {
            return false;
        };
        self.had_mishap = true;
        match mishap.kind {
            MishapKind::Standstill(time) => self.ranks[rank].still_until = self.now + time,
            MishapKind::Death => self.die(rank, script),
        }
        self.ranks[rank].is_dead
    }

    /// All that others get from the rank from now on is what was under way, if that, and that its connections close.
    fn die(&mut self, rank: usize, script: &WorldScript) {
        let loses = self.draw(script.seed).is_multiple_of(2);
        let is_own = |channel: Channel| matches!(channel, Channel::Messages { from, .. } if from == rank);
        self.parcels.retain(|_, parcel| !(loses && is_own(parcel.channel)));
        for (channel, deed) in mem::take(&mut self.closings) {
            match channel.from() == rank {
                true => self.send(channel, deed, script),
                false => self.closings.push((channel, deed)),
            }
        }
        self.ranks[rank].is_dead = true;
    }

    fn send(&mut self, channel: Channel, deed: Deed, script: &WorldScript) {
        if self.ranks[channel.from()].is_dead {
            return;
        }
        let is_message = matches!(channel, Channel::Messages { .. });
        if is_message && script.flaw == Some(TransportFlaw::Loss) && self.draw(script.seed).is_multiple_of(LOST_IN) {
            return;
        }
        let may_overtake = is_message && script.flaw == Some(TransportFlaw::Overtaking);
        let drawn = self.now + self.draw_time(script.seed);
        let last = self.last.entry(channel).or_default();
        *last = drawn.max(*last);
        let time = if may_overtake { drawn } else { *last };
        self.sent += 1;
        self.parcels.insert((time, self.sent), Parcel { channel, deed });
    }

    /// What brings the first parcel whose time has come.
    fn arrival(&mut self) -> Option<Deed> {
        while let Some(first) = self.parcels.first_entry().filter(|first| first.key().0 <= self.now) {
            let ((_, order), parcel) = first.remove_entry();
            let (from, to) = (parcel.channel.from(), parcel.channel.to());
            if self.ranks[to].is_dead {
                continue;
            }
            let still_until = self.ranks[to].still_until;
            if still_until > self.now {
                self.parcels.insert((still_until, order), parcel);
                continue;
            }
            self.ranks[to].has_news = true;
            // Who has sent a message may wait until it has arrived.
            self.ranks[from].has_news = true;
            return Some(parcel.deed);
        }
        None
    }

    /// The time at which a rank can go on, if nothing arrives before.
    fn ready_at(&self, player: &Player) -> Option<Duration> {
        let granted = match player.wish {
            Wish::News(_) if player.has_news => Duration::ZERO,
            Wish::News(_) | Wish::Work => player.until,
            Wish::Entrance | Wish::Nothing => return None,
        };
        (!player.is_dead).then(|| granted.max(player.still_until))
    }

    fn ready(&self) -> Vec<usize> {
        let is_ready = |rank: &usize| self.ready_at(&self.ranks[*rank]).is_some_and(|time| time <= self.now);
        (0..self.ranks.len()).filter(is_ready).collect()
    }

    /// When something can happen next.
    fn next_time(&self) -> Option<Duration> {
        let ranks = self.ranks.iter().filter_map(|player| self.ready_at(player));
        ranks.chain(self.parcels.keys().map(|&(time, _)| time)).min()
    }

    /// What moves on the operations of a rank that nobody has to wait for: now and then, as its thread would.
    fn mover(&mut self, script: &WorldScript) -> Option<Nudge> {
        let draw = self.draw(script.seed);
        let rank = (draw >> 8) as usize % self.ranks.len();
        let player = &mut self.ranks[rank];
        let moves = draw.is_multiple_of(4) && !player.is_dead && player.still_until <= self.now;
        player.has_news |= moves;
        player.mover.clone().filter(|_| moves)
    }
}

impl Channel {
    fn from(self) -> usize {
        match self {
            Channel::Messages { from, .. } | Channel::Signals { from, .. } => from,
        }
    }

    fn to(self) -> usize {
        match self {
            Channel::Messages { to, .. } | Channel::Signals { to, .. } => to,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn what_the_dead_had_sent_is_lost_or_not() {
        let left = |seed| {
            let turns = Turns::new(2, WorldScript::undisturbed(seed));
            for (from, to) in turns.pairs() {
                turns.send(Channel::Messages { from, to, tag: 0 }, Box::new(|| {}));
            }
            let mut state = turns.state();
            state.die(1, &turns.script);
            state.parcels.values().map(|parcel| parcel.channel.from()).collect::<BTreeSet<_>>()
        };
        let seen: BTreeSet<_> = (0..20).map(left).collect();
        assert_eq!(seen, BTreeSet::from([[0].into(), [0, 1].into()]));
    }
}
