//! Where thread ranks meet: a ring of rounds, in each of which every rank publishes one request, copies what it
//! needs straight out of its peers' buffers, and takes its own back when nobody reads it any more.
//!
//! ```text
//!   per rank:  posted ──all──▶ (reduced ──all──▶) finished ──all──▶ take back
//!                 │   check, copy or reduce   copy chunks      │
//!                 └────── buffers belong to the round ─────────┘
//! ```
//!
//! States, invariants and memory orderings are in README.md beside this file.

mod entry;
mod fate;
mod lane;
mod moves;
mod place;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Attendance, Error, Party};
use crate::operation::{Completed, Operation};
use crate::sync::UnsafeCell;
use crate::sync::atomic::{AtomicU64, Ordering};
use entry::Entry;
pub(crate) use fate::{Fate, Interrupt};
pub(crate) use lane::Lane;

/// Operations one rank may have in flight; starting more first finishes the oldest.
pub(crate) const ROUNDS: u64 = if cfg!(loom) { 2 } else { 16 };
const _: () = assert!(ROUNDS <= u64::BITS as u64, "a bit for each");

/// How far a rank has come with a round.
#[derive(Clone, Copy)]
enum Stage {
    /// Its request may be read.
    Posted,
    /// Its chunk of an all-reduce may be read.
    Reduced,
    /// Its device has been asked for all it copies, and its buffer bears the mark of that.
    Begun,
    /// It reads no peer's buffer any more.
    Finished,
}

/// How far a rank has come. Written by that rank only; lines of its own keep ranks from slowing each other's stores.
#[repr(align(128))]
struct RoundProgress {
    /// The number of rounds that have been posted.
    posted: AtomicU64,
    /// Per row of the ring, a bit: whether the round there is a barrier. Peers that see the bits of all need not read their
    /// entries.
    barriers: AtomicU64,
    /// The number of rounds that had been finished when the newest one was posted.
    finished_before: AtomicU64,
    later: LaterProgress,
}

/// Beyond what peers of a barrier read.
#[repr(align(128))]
struct LaterProgress {
    /// Per later stage, the number of rounds that have reached it.
    counters: [AtomicU64; 3],
    /// So many rounds every rank was seen to have finished. For this rank alone.
    finished_by_all: AtomicU64,
}

/// One rank's place in one round, on lines of its own for the same reason.
#[repr(align(128))]
struct Cell(UnsafeCell<Option<Entry>>);

/// The meeting place of one group.
pub(crate) struct Rendezvous {
    fate: Arc<Fate>,
    /// World rank of each rank of the group.
    members: Vec<usize>,
    progress: Box<[RoundProgress]>,
    /// `ROUNDS` rows of one cell a rank.
    cells: Box<[Cell]>,
    /// Groups being split off, by round and colour.
    nursery: Mutex<HashMap<(u64, usize), Newborn>>,
}

/// A group being split off.
struct Newborn {
    group: Arc<Rendezvous>,
    /// Members that have yet to fetch it.
    awaited: usize,
}

// SAFETY: of the fields only `cells` is not `Sync` by itself. A cell is written by its owner alone, when the
// counters prove that no peer reads it (README, I1 and I4), and read by peers only in between.
unsafe impl Sync for Rendezvous {}

impl Rendezvous {
    /// A meeting place for the ranks `members` of the world that shares `fate`.
    pub(crate) fn new(members: Vec<usize>, fate: Arc<Fate>) -> Self {
        let size = members.len();
        let progress = (0..size).map(|_| RoundProgress {
            posted: AtomicU64::new(0),
            barriers: AtomicU64::new(0),
            finished_before: AtomicU64::new(0),
            later: LaterProgress {
                counters: std::array::from_fn(|_| AtomicU64::new(0)),
                finished_by_all: AtomicU64::new(0),
            },
        });
        let cells = (0..size * ROUNDS as usize).map(|_| Cell(UnsafeCell::new(None)));
        Rendezvous {
            fate,
            members,
            progress: progress.collect(),
            cells: cells.collect(),
            nursery: Mutex::new(HashMap::new()),
        }
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn world_rank(&self, rank: usize) -> usize {
        self.members[rank]
    }

    pub(crate) fn fate(&self) -> &Fate {
        &self.fate
    }

    /// The group of `members` (world ranks) that splits off with `color` in round `index`: made by whoever comes
    /// first, forgotten here when all have fetched it.
    pub(crate) fn split_off(&self, index: u64, color: usize, members: Vec<usize>) -> Arc<Rendezvous> {
        let mut nursery = self.nursery.lock().unwrap_or_else(PoisonError::into_inner);
        let newborn = nursery.entry((index, color)).or_insert_with(|| {
            let awaited = members.len();
            Newborn { group: Arc::new(Rendezvous::new(members, self.fate.clone())), awaited }
        });
        newborn.awaited -= 1;
        let (child, awaited) = (newborn.group.clone(), newborn.awaited);
        if awaited == 0 {
            nursery.remove(&(index, color));
        }
        child
    }

    /// Publishes `entry` as rank `rank`'s part of round `index`. Peers that sleep are not woken: the caller rings, or completes
    /// the round next.
    ///
    /// # Safety
    /// Called by rank `rank` alone, once per round, in order, after it completed round `index - ROUNDS`, and not again after an
    /// error.
    unsafe fn post(&self, rank: usize, index: u64, entry: Entry, name: &str) -> Result<(), Error> {
        let RoundProgress { barriers, finished_before, later, .. } = &self.progress[rank];
        // SAFETY: the caller's own cell, which it writes alone.
        let has_entry = self.cell(rank, index).with(|cell| unsafe { (*cell).is_some() });
        if has_entry && later.finished_by_all.load(Ordering::Relaxed) <= index - ROUNDS {
            // A round without buffers was completed while peers could still read the entry.
            Round { rendezvous: self, rank, index: index - ROUNDS, name }.wait_for(Stage::Finished)?;
        }
        let is_barrier = entry.lends_nothing();
        // SAFETY: the caller's own cell, which peers finished reading in round `index - ROUNDS` and will not read
        // for this round before the counter below says so.
        self.cell(rank, index).with_mut(|cell| unsafe { *cell = Some(entry) });
        let bit = 1 << (index % ROUNDS);
        let others = barriers.load(Ordering::Relaxed) & !bit;
        barriers.store(if is_barrier { others | bit } else { others }, Ordering::Relaxed);
        finished_before.store(self.counter(rank, Stage::Finished).load(Ordering::Relaxed), Ordering::Release);
        self.reach(rank, Stage::Posted, index);
        Ok(())
    }

    /// Brings rank `rank`'s part of round `index` to its end and takes its buffers back.
    ///
    /// # Safety
    /// Called by rank `rank` alone, once per posted round, in order, and not again after an error.
    unsafe fn complete(&self, rank: usize, index: u64, name: &str) -> Result<Completed, Error> {
        let round = Round { rendezvous: self, rank, index, name };
        round.wait_for(Stage::Posted)?;
        if (0..self.size()).all(|rank| self.is_barrier(rank, index)) {
            let finished = self.progress.iter().map(|peer| peer.finished_before.load(Ordering::Acquire)).min();
            self.progress[rank].later.finished_by_all.store(finished.unwrap_or(0), Ordering::Relaxed);
            // Rings for both stages.
            self.arrive(rank, Stage::Finished, index);
            return Ok(Completed::nothing());
        }
        self.fate.ring();
        // SAFETY: all ranks have posted this round, and none takes its entry back before this one has finished.
        unsafe {
            round.check()?;
            moves::perform(&round)?;
        }
        self.arrive(rank, Stage::Finished, index);
        round.wait_for(Stage::Finished)?;
        // SAFETY: the caller's own cell, which all ranks have finished with.
        let entry = self.cell(rank, index).with_mut(|cell| unsafe { (*cell).take() });
        let entry = entry.expect("a posted round holds its entry until it is taken back here");
        Ok(entry.request.operation.into_completed())
    }

    /// Waits until rank `rank`'s device is done with what it has begun of round `index`.
    ///
    /// # Safety
    /// Called by rank `rank` alone, of a round that it has posted and not taken back.
    unsafe fn settle(&self, rank: usize, index: u64) {
        // SAFETY: the caller's own cell, which it writes alone.
        let entry = self.cell(rank, index).with(|cell| unsafe { (*cell).as_ref() });
        // SAFETY: the entry is this rank's, and published.
        entry.into_iter().for_each(|entry| unsafe { entry.target_to_read().settle() });
    }

    fn cell(&self, rank: usize, index: u64) -> &UnsafeCell<Option<Entry>> {
        &self.cells[(index % ROUNDS) as usize * self.size() + rank].0
    }

    fn counter(&self, rank: usize, stage: Stage) -> &AtomicU64 {
        let RoundProgress { posted, later, .. } = &self.progress[rank];
        match stage {
            Stage::Posted => posted,
            Stage::Reduced => &later.counters[0],
            Stage::Begun => &later.counters[1],
            Stage::Finished => &later.counters[2],
        }
    }

    /// Whether rank `rank`'s part of round `index`, which is posted and not finished by the caller, is a barrier.
    fn is_barrier(&self, rank: usize, index: u64) -> bool {
        self.progress[rank].barriers.load(Ordering::Relaxed) >> (index % ROUNDS) & 1 == 1
    }

    /// Release: whoever reads the counter sees what this rank wrote before.
    fn reach(&self, rank: usize, stage: Stage, index: u64) {
        self.counter(rank, stage).store(index + 1, Ordering::Release);
    }

    /// The same, and wakes who sleeps.
    fn arrive(&self, rank: usize, stage: Stage, index: u64) {
        self.reach(rank, stage, index);
        self.fate.ring();
    }

    fn has_arrived(&self, rank: usize, stage: Stage, index: u64) -> bool {
        self.counter(rank, stage).load(Ordering::Acquire) > index
    }
}

/// One round as rank `rank` sees it. `name` is what errors call the communicator.
struct Round<'a> {
    rendezvous: &'a Rendezvous,
    rank: usize,
    index: u64,
    name: &'a str,
}

impl Round<'_> {
    fn size(&self) -> usize {
        self.rendezvous.size()
    }

    /// The peers of this rank in an order that starts behind it, so that ranks do not all read the same one.
    fn peers(&self) -> impl Iterator<Item = usize> {
        let (rank, size) = (self.rank, self.size());
        (1..size).map(move |step| (rank + step) % size)
    }

    /// What rank `rank` published.
    ///
    /// # Safety
    /// All ranks have posted this round, and the caller has not finished it.
    unsafe fn entry(&self, rank: usize) -> &Entry {
        // SAFETY: posted entries are not written until all ranks, the caller among them, have finished.
        let entry = self.rendezvous.cell(rank, self.index).with(|cell| unsafe { (*cell).as_ref() });
        entry.expect("every rank has posted this round")
    }

    /// Waits until every rank has reached `stage`.
    fn wait_for(&self, stage: Stage) -> Result<(), Error> {
        let mut next = 0;
        let all_arrived = || {
            while next < self.size() && self.rendezvous.has_arrived(next, stage, self.index) {
                next += 1;
            }
            next == self.size()
        };
        let owes_a_ring = matches!(stage, Stage::Posted);
        let waited = self.rendezvous.fate.wait_until(all_arrived, owes_a_ring);
        waited.map_err(|interrupt| self.interrupted(stage, interrupt))
    }

    fn interrupted(&self, stage: Stage, interrupt: Interrupt) -> Error {
        let waited = match interrupt {
            Interrupt::Aborted(error) => return error,
            Interrupt::TimedOut { waited } => waited,
        };
        let is_late = |rank: &usize| !self.rendezvous.has_arrived(*rank, stage, self.index);
        let (late, there): (Vec<usize>, Vec<usize>) = (0..self.size()).partition(is_late);
        let [missing, arrived] =
            [late, there].map(|ranks| ranks.into_iter().map(|rank| self.rendezvous.world_rank(rank)).collect());
        // SAFETY: this rank posted before it waited, and takes its entry back only after all waiting.
        let request = unsafe { &self.entry(self.rank).request };
        let (operation, site) = (request.operation.to_string(), request.site);
        let communicator = self.name.to_string();
        let attendance = Box::new(Attendance { arrived, last: Vec::new() });
        Error::Timeout { communicator, operation, site, waited, missing, attendance }
    }

    /// Can these requests meet? Every rank checks all of them, since it is about to read by their counts.
    ///
    /// # Safety
    /// As for [`Round::entry`].
    unsafe fn check(&self) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        let first = unsafe { self.entry(0) };
        for rank in 1..self.size() {
            // SAFETY: the caller's promise.
            let entry = unsafe { self.entry(rank) };
            if !first.operation().agrees_with(entry.operation()) {
                let (first, second) = (self.party(0, first), self.party(rank, entry));
                return Err(Error::Mismatch { communicator: self.name.to_string(), index: self.index, first, second });
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.check_peer_counts() }
    }

    /// All-to-all: does every peer send what this rank expects, and expect what it sends?
    ///
    /// # Safety
    /// As for [`Round::entry`].
    unsafe fn check_peer_counts(&self) -> Result<(), Error> {
        for peer in 0..self.size() {
            // SAFETY: the caller's promise.
            unsafe {
                self.check_counts_between(peer, self.rank)?;
                self.check_counts_between(self.rank, peer)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Round::entry`].
    unsafe fn check_counts_between(&self, sender: usize, receiver: usize) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        let (from, to) = unsafe { (self.entry(sender), self.entry(receiver)) };
        let (Operation::AllToAll { send_counts, .. }, Operation::AllToAll { recv_counts, .. }) =
            (from.operation(), to.operation())
        else {
            return Ok(());
        };
        let (sent, expected) = (send_counts[receiver], recv_counts[sender]);
        if sent == expected {
            return Ok(());
        }
        let (receiver, sender) = (self.party(receiver, to), self.party(sender, from));
        Err(Error::PeerCounts { communicator: self.name.to_string(), receiver, sender, expected, sent })
    }

    fn party(&self, rank: usize, entry: &Entry) -> Box<Party> {
        let rank = self.rendezvous.world_rank(rank);
        Box::new(Party { rank, operation: entry.operation().to_string(), site: entry.request.site.into() })
    }
}
