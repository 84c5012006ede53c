//! Checks over a control lane that all ranks of a group come to the same operations, before any of them moves data: what
//! ranks that share memory do in place, for ranks that do not.
//!
//! ```text
//!   start ── Arrived to each member ──▶ announced ──(all members have arrived)──▶ checked ── inner start ──▶ begun
//!                                                      │ differ: Mismatch, PeerCounts             inner wait ─┘
//!                                                      │ missing: Timeout, with where each was last
//!                                                      └ Failed from anyone: Aborted
//! ```
//!
//! Announcing does not wait, so operations stay asynchronous: every later `start` begins what has been agreed on
//! meanwhile, and `wait` the rest, in the order in which they were started. Where an operation begins at once
//! ([`Agreement::beside`]), `wait` first sees that all agree.
//!
//! A failure is announced to all ranks of the world, whatever group they wait in, and each keeps the first cause it hears
//! of. What a rank hears of while its data is under way it learns of from the data's own communicator, which is aborted
//! too, or with its next operation.
//!
//! Each operation costs a message from every member to every other. A rank that has waited for a tenth of its timeout
//! also tells all ranks where, for the sake of those that time out elsewhere.

mod desk;
mod hub;

use std::sync::Arc;

use super::Wrapper;
use crate::Communicator;
use crate::control::ControlLane;
use crate::error::Error;
use crate::operation::{Completed, Request};
use crate::pending::{InFlight, Pending};
use desk::{Begins, Desk};
use hub::Hub;
pub use hub::Patience;

/// A communicator whose operations are agreed on over a control lane; so are those of what is split from it.
pub struct Agreement {
    /// Under this communicator's name; the desk has the lane of operations.
    inner: Arc<dyn Communicator>,
    desk: Arc<Desk>,
}

impl Agreement {
    /// `inner`, a world, with `lane` between the same ranks. All ranks of the world are wrapped, or none.
    ///
    /// # Panics
    /// If the two do not place this rank alike.
    pub fn wrap(inner: Arc<dyn Communicator>, lane: Arc<dyn ControlLane>, patience: Patience) -> Arc<dyn Communicator> {
        Agreement::starting(Begins::Agreed, inner, lane, patience)
    }

    /// The same, but data moves while ranks still agree, and whoever waits for it hears of failures over the lane. For
    /// engines to which an operation that its peers do not share does no harm, such as [`crate::messages`].
    ///
    /// # Panics
    /// As [`Agreement::wrap`].
    pub fn beside(
        inner: Arc<dyn Communicator>,
        lane: Arc<dyn ControlLane>,
        patience: Patience,
    ) -> Arc<dyn Communicator> {
        Agreement::starting(Begins::AtOnce, inner, lane, patience)
    }

    fn starting(
        start: Begins,
        inner: Arc<dyn Communicator>,
        lane: Arc<dyn ControlLane>,
        patience: Patience,
    ) -> Arc<dyn Communicator> {
        let (of_data, of_lane) = ((inner.rank(), inner.size()), (lane.rank(), lane.size()));
        assert_eq!(of_data, of_lane, "rank and size of the world, and those of its control lane");
        let members = (0..inner.size()).collect();
        let hub = Arc::new(Hub::new(inner.clone(), lane, patience));
        if start == Begins::AtOnce {
            hub.listen();
        }
        let desk = Arc::new(Desk::new(hub, inner.clone(), (0, members), start));
        Arc::new(Agreement { inner, desk })
    }

    fn child(&self, (inner, group): (Arc<dyn Communicator>, u64)) -> Result<Arc<dyn Communicator>, Error> {
        let desk = self.desk.child(inner.clone(), group)?;
        Ok(Arc::new(Agreement { inner, desk: Arc::new(desk) }))
    }
}

impl Wrapper for Agreement {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    /// The same operations, under another name: what is split has a desk of its own.
    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Agreement { inner, desk: self.desk.clone() })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        let name: Arc<str> = self.inner.name().into();
        let index = self.desk.start(request, &name)?;
        let announced = Announced { desk: self.desk.clone(), name, index, is_awaited: false };
        Ok(Pending::in_flight(Box::new(announced)))
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        self.child(self.desk.split(self.inner.name(), color as u64, || self.inner.split(color, key))?)
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        self.child(self.desk.split(self.inner.name(), 0, || self.inner.duplicate())?)
    }

    fn abort(&self, reason: &str) {
        self.desk.abort(reason);
    }
}

/// A started operation: its place in the order of its desk.
struct Announced {
    desk: Arc<Desk>,
    name: Arc<str>,
    index: u64,
    is_awaited: bool,
}

impl InFlight for Announced {
    fn wait(mut self: Box<Self>) -> Result<Completed, Error> {
        self.is_awaited = true;
        self.desk.wait(self.index, &self.name)
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        if !self.is_awaited {
            self.desk.abandon(self.index);
        }
    }
}
