//! What can go wrong between ranks, said so that the reader knows what, where, and what to do.
//!
//! Ranks named in errors are ranks of the world, also when the operation ran on a communicator split from it.
//! Any of these errors on one rank aborts the whole world: its peers get [`Error::Aborted`], never silence.

use std::fmt;
use std::panic::Location;
use std::time::Duration;

use crate::operation::Collective;
use crate::site::CallSite;

/// A failed operation.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// Two ranks met with operations that cannot meet.
    #[error(
        "communicator '{communicator}': operation {index} differs between ranks: {first}, but {second}; \
         every rank must issue the same collectives in the same order"
    )]
    Mismatch {
        communicator: String,
        /// The operation's place in the order of this communicator, from 0.
        index: u64,
        first: Box<Party>,
        second: Box<Party>,
    },

    /// Some ranks did not arrive in time.
    #[error(
        "communicator '{communicator}': {operation} at {site} waited {waited:.1?} for rank(s) {missing:?}{attendance}; see what those ranks were doing, or raise the timeout if they were only slow"
    )]
    Timeout {
        communicator: String,
        operation: String,
        site: &'static Location<'static>,
        waited: Duration,
        /// Ranks of the world: those that have not come, or for whom they wait elsewhere, where ranks tell each other.
        missing: Vec<usize>,
        attendance: Box<Attendance>,
    },

    /// Whoever carries the data could not.
    #[error("communicator '{communicator}': {operation} at {site} failed: {detail}")]
    Transport { communicator: String, operation: String, site: &'static Location<'static>, detail: String },

    /// Some rank failed, or asked everybody to stop.
    #[error(
        "rank {by} aborted the world: {reason}{}; look for the first error of rank {by}",
        interrupted.as_ref().map_or_else(String::new, |it| format!(" ({it})"))
    )]
    Aborted {
        by: usize,
        reason: String,
        /// What this rank was in when it heard of it, where ranks tell each other ([`crate::wrap::Agreement`]).
        interrupted: Option<Box<Interruption>>,
    },

    /// The request contradicts itself; noticed by the rank that made it.
    #[error("rank {rank}: bad request {operation} at {site}: {detail}")]
    Counts { rank: usize, operation: String, site: &'static Location<'static>, detail: String },

    /// All-to-all: one rank expects another number of elements than its peer sends it.
    #[error(
        "communicator '{communicator}': rank {} at {} expects {expected} elements of rank {}, which at {} sends it \
         {sent}; exchange the counts first (all_to_all_u64) and size the receive buffer by them",
        receiver.rank, receiver.site, sender.rank, sender.site
    )]
    PeerCounts { communicator: String, receiver: Box<Party>, sender: Box<Party>, expected: usize, sent: usize },
}

impl Error {
    /// Rank `by` ended the world.
    pub fn aborted(by: usize, reason: impl Into<String>) -> Error {
        Error::Aborted { by, reason: reason.into(), interrupted: None }
    }

    /// The line whose operation failed, where one is to blame.
    pub(crate) fn site(&self) -> Option<CallSite> {
        match self {
            Error::Timeout { site, .. } | Error::Counts { site, .. } | Error::Transport { site, .. } => {
                Some((*site).into())
            }
            Error::Mismatch { .. } | Error::PeerCounts { .. } | Error::Aborted { .. } => None,
        }
    }
}

/// What is known of a group in which ranks are missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attendance {
    /// Ranks of the world that have come to the operation.
    pub arrived: Vec<usize>,
    /// Where each rank that has not come was last, and those that it waits for, where ranks tell each other
    /// ([`crate::wrap::Agreement`]); first who waits for nobody.
    pub last: Vec<LastSeen>,
}

/// An operation that the end of the world interrupted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interruption {
    pub communicator: String,
    /// The operation with its kinds and counts, as text.
    pub operation: String,
    /// The line that asked for it.
    pub site: &'static Location<'static>,
    /// Ranks of the world that had not come to it.
    pub missing: Vec<usize>,
    pub attendance: Attendance,
}

/// One side of a disagreement.
#[derive(Debug, Clone)]
pub struct Party {
    /// Rank in the world.
    pub rank: usize,
    /// The operation with its kinds and counts, as text.
    pub operation: String,
    /// The line that asked for it.
    pub site: CallSite,
}

/// Where a rank was when it was last heard of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastSeen {
    /// Rank in the world.
    pub rank: usize,
    /// The operation it had come to, and the line that asked for it; nothing before its first.
    pub at: Option<(Collective, CallSite)>,
    /// Ranks for whom it has been waiting there itself.
    pub waits_for: Vec<usize>,
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} is in {} at {}", self.rank, self.operation, self.site)
    }
}

impl fmt::Display for Attendance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.last.iter().map(LastSeen::to_string).collect();
        if !texts.is_empty() {
            write!(f, " ({})", texts.join("; "))?;
        }
        write!(f, ", and {:?} had come to it", self.arrived)
    }
}

impl fmt::Display for Interruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Interruption { communicator, operation, site, missing, attendance } = self;
        write!(f, "heard of in {operation} at {site} of communicator '{communicator}', ")?;
        match missing.as_slice() {
            [] => write!(f, "to which all had come"),
            missing => write!(f, "which lacked rank(s) {missing:?}{attendance}"),
        }
    }
}

impl fmt::Display for LastSeen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.at {
            Some((collective, site)) => write!(f, "rank {} was last in {} at {site}", self.rank, collective.name())?,
            None => write!(f, "rank {} has not started any operation yet", self.rank)?,
        }
        match self.waits_for.as_slice() {
            [] => Ok(()),
            waits_for => write!(f, ", where it waits for rank(s) {waits_for:?}"),
        }
    }
}

/// Why a rank that drops a communicator with `operations` in flight ends the world.
pub(crate) fn left_in_flight(operations: u64) -> String {
    format!(
        "it left a communicator with {operations} operation(s) in flight, after an error of its own or because it \
         forgot to wait for what it had started"
    )
}
