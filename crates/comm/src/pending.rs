//! An operation under way.

use crate::error::Error;
use crate::operation::Completed;

/// What an implementation knows about a started operation.
///
/// Dropping it without waiting gives up the result, not the duty: peers still count on this rank, so the
/// implementation finishes the operation with the next one awaited on the same communicator.
pub trait InFlight: Send {
    /// Finishes the operation and every earlier one of the same communicator.
    fn wait(self: Box<Self>) -> Result<Completed, Error>;
}

/// A started operation, to be awaited in any order relative to others.
#[must_use = "peers count on this operation; wait for it"]
pub struct Pending(State);

enum State {
    Finished(Result<Completed, Error>),
    InFlight(Box<dyn InFlight>),
}

impl Pending {
    /// An operation that is already over.
    pub fn finished(result: Result<Completed, Error>) -> Self {
        Pending(State::Finished(result))
    }

    /// An operation that its implementation will finish.
    pub fn in_flight(operation: Box<dyn InFlight>) -> Self {
        Pending(State::InFlight(operation))
    }

    /// Blocks until the buffers are back, or the operation has failed.
    pub fn wait(self) -> Result<Completed, Error> {
        match self.0 {
            State::Finished(result) => result,
            State::InFlight(operation) => operation.wait(),
        }
    }
}
