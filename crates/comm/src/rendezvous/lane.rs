//! One rank's way through the rounds of one rendezvous: what it has started, finished, and not yet fetched.
//!
//! Rounds are brought to their end in the order in which they were started, whichever is awaited first; results of
//! earlier ones are kept until they are asked for. This is the only caller of the rendezvous' unsafe methods: the
//! lock around the bookkeeping is what makes it one caller, in order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::entry::Entry;
use super::{ROUNDS, Rendezvous};
use crate::error::{Error, left_in_flight};
use crate::operation::{Completed, Request};
use crate::validate::validate_in_memory;

/// One rank's membership. Exactly one exists per rank and rendezvous.
pub(crate) struct Lane {
    rendezvous: Arc<Rendezvous>,
    rank: usize,
    book: Mutex<Book>,
}

/// Rounds `0..finished` are over, `finished..started` in flight.
#[derive(Default)]
struct Book {
    started: u64,
    finished: u64,
    /// A round failed; its successors must not be attempted, for its buffers may still be read.
    failed: bool,
    /// Finished rounds nobody has fetched yet.
    results: BTreeMap<u64, Completed>,
    /// Rounds in flight whose result nobody wants.
    abandoned: BTreeSet<u64>,
}

impl Lane {
    /// Rank `rank`'s membership; to be made once for each rank.
    pub(crate) fn new(rendezvous: Arc<Rendezvous>, rank: usize) -> Self {
        Lane { rendezvous, rank, book: Mutex::default() }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn rendezvous(&self) -> &Rendezvous {
        &self.rendezvous
    }

    fn world_rank(&self) -> usize {
        self.rendezvous.world_rank(self.rank)
    }

    /// Aborts the world in this rank's name.
    pub(crate) fn abort(&self, reason: &str) {
        self.rendezvous.fate().abort(self.world_rank(), reason);
    }

    /// Publishes `request`; returns its place in the order. `name` is what errors call the communicator.
    pub(crate) fn start(&self, request: Request, name: &str) -> Result<u64, Error> {
        let index = self.start_in(&mut self.book(), request, name)?;
        self.rendezvous.fate().ring();
        Ok(index)
    }

    /// Publishes `request`, finishes its round and all before it, and returns its buffers.
    pub(crate) fn finish(&self, request: Request, name: &str) -> Result<Completed, Error> {
        let mut book = self.book();
        let index = self.start_in(&mut book, request, name)?;
        self.wait_in(&mut book, index, name)
    }

    /// Finishes round `index` and all before it; returns its buffers. To be called once for each round.
    pub(crate) fn wait(&self, index: u64, name: &str) -> Result<Completed, Error> {
        self.wait_in(&mut self.book(), index, name)
    }

    /// Does not ring for what it posts: see [`Rendezvous::post`].
    fn start_in(&self, book: &mut Book, request: Request, name: &str) -> Result<u64, Error> {
        self.check(book)?;
        self.rendezvous.fate().check()?;
        if let Err(error) = validate_in_memory(&request, self.rank, self.rendezvous.size(), self.world_rank()) {
            return Err(self.fail(book, error));
        }
        if book.started - book.finished == ROUNDS {
            self.complete_oldest(book, name)?;
        }
        let index = book.started;
        // SAFETY: this rank's only lane, under its lock, in order; at most `ROUNDS` rounds are in flight, so
        // `index - ROUNDS` has been completed.
        match unsafe { self.rendezvous.post(self.rank, index, Entry::new(request), name) } {
            Ok(()) => book.started += 1,
            Err(error) => return Err(self.fail(book, error)),
        }
        Ok(index)
    }

    fn wait_in(&self, book: &mut Book, index: u64, name: &str) -> Result<Completed, Error> {
        while book.finished < index {
            self.complete_oldest(book, name)?;
        }
        if book.finished > index {
            return Ok(book.results.remove(&index).expect("a finished round is fetched once"));
        }
        self.complete(book, name)
    }

    /// Gives up the result of round `index`.
    pub(crate) fn abandon(&self, index: u64) {
        let mut book = self.book();
        if book.finished > index {
            book.results.remove(&index);
        } else {
            book.abandoned.insert(index);
        }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finishes the oldest round in flight and keeps its result if anybody may ask for it.
    fn complete_oldest(&self, book: &mut Book, name: &str) -> Result<(), Error> {
        let index = book.finished;
        let completed = self.complete(book, name)?;
        if !book.abandoned.remove(&index) {
            book.results.insert(index, completed);
        }
        Ok(())
    }

    fn complete(&self, book: &mut Book, name: &str) -> Result<Completed, Error> {
        self.check(book)?;
        // A device that fails unwinds from there.
        book.failed = true;
        // SAFETY: this rank's only lane, under its lock, in order; a failed round is not attempted again.
        match unsafe { self.rendezvous.complete(self.rank, book.finished, name) } {
            Ok(completed) => {
                book.failed = false;
                book.finished += 1;
                Ok(completed)
            }
            Err(error) => Err(self.fail(book, error)),
        }
    }

    /// An error once a round has failed: what follows it must not be attempted.
    fn check(&self, book: &Book) -> Result<(), Error> {
        if !book.failed {
            return Ok(());
        }
        // Unless the world knows already why.
        self.abort("an operation before this one failed");
        Err(self.rendezvous.fate().error())
    }

    /// Tells the world, which keeps the first cause only.
    fn fail(&self, book: &mut Book, error: Error) -> Error {
        book.failed = true;
        if !matches!(error, Error::Aborted { .. }) {
            self.abort(&error.to_string());
        }
        error
    }
}

impl Drop for Lane {
    /// A rank that leaves rounds unfinished would leave its peers waiting: tell them instead. The buffers stay with
    /// the rendezvous, which lives as long as any peer might read them. While something unwinds, whoever catches it tells
    /// them why.
    fn drop(&mut self) {
        let book = self.book();
        let (left, failed) = (book.started - book.finished, book.failed);
        // A device may be reading what is freed with the rendezvous.
        // SAFETY: these rounds are posted and not taken back, by this rank's only lane.
        (book.finished..book.started).for_each(|index| unsafe { self.rendezvous.settle(self.rank, index) });
        drop(book);
        if left > 0 && !failed && !thread::panicking() {
            self.abort(&left_in_flight(left));
        }
    }
}
