//! Where a rank may lose its turn besides waiting: as it starts an operation, and as it begins to wait for one.

use std::sync::Arc;

use super::turns::{Turns, Wish};
use crate::Communicator;
use crate::error::Error;
use crate::operation::{Completed, Request};
use crate::pending::{InFlight, Pending};
use crate::wrap::Wrapper;

/// A communicator whose rank works for a drawn time before each call.
pub(super) struct Stepping {
    pub(super) inner: Arc<dyn Communicator>,
    pub(super) rank: usize,
    pub(super) turns: Arc<Turns>,
}

impl Wrapper for Stepping {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Stepping { inner, rank: self.rank, turns: self.turns.clone() })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        self.turns.pause(self.rank, Wish::Work);
        let (pending, rank, turns) = (self.inner.start(request)?, self.rank, self.turns.clone());
        Ok(Pending::in_flight(Box::new(Stepped { pending, rank, turns })))
    }
}

/// An operation that its rank comes to await after some work.
struct Stepped {
    pending: Pending,
    rank: usize,
    turns: Arc<Turns>,
}

impl InFlight for Stepped {
    fn wait(self: Box<Self>) -> Result<Completed, Error> {
        self.turns.pause(self.rank, Wish::Work);
        self.pending.wait()
    }
}
