//! Why training stopped.

use guildhall_comm as comm;
use guildhall_tensor::Excess;

use serde::{Deserialize, Serialize};

use super::job::InitError;
use crate::launch::Tellable;
use crate::{checkpoint, data, metrics, moe, optim};

/// A failure on one rank.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Comm(#[from] comm::Error),
    #[error(transparent)]
    Moe(#[from] moe::Error),
    #[error(transparent)]
    Optimizer(#[from] optim::Error),
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error(transparent)]
    Init(#[from] InitError),
    #[error(transparent)]
    Data(#[from] data::Error),
    #[error(transparent)]
    Metrics(#[from] metrics::Error),
    /// Found before the first step, and not in what ranks said to each other: the request was wrong, not the run.
    #[error(transparent)]
    Start(Box<Error>),
    #[error(
        "step {step}: {what} is not finite; it began on rank {rank} in micro-batch {micro}: {place}; start anew with \
         a lower train.lr or a train.clip of 1"
    )]
    NonFinite { step: u64, what: &'static str, rank: usize, micro: usize, place: String },
    #[error(
        "step {step}: {what} is not finite, but no single op on any rank made it so: the sum over ranks overflowed; \
         start anew with a lower train.lr or a train.clip of 1"
    )]
    Overflow { step: u64, what: &'static str },
    /// Another rank found where; its error says it.
    #[error("step {step}: another rank met a number that is not finite")]
    NonFiniteElsewhere { step: u64 },
    /// What ranks say to each other does not tell in which step it was, and where in the model.
    #[error("step {step}{}: {error}", place.as_ref().map_or(String::new(), |place| format!(", {place}")))]
    At { step: u64, place: Option<String>, error: Box<Error> },
    #[error("step {step}: the held-out loss is not finite; start anew with a lower train.lr or a train.clip of 1")]
    HeldOut { step: u64 },
    #[error(
        "step {step}: the copies of {weight} differ, {who}: a memory or a processor has changed what it held; have these \
         machines tested"
    )]
    Replicas { step: u64, weight: String, who: String },
    #[error("the scores after token {token} are not finite: the checkpoint's weights are too large to compute with")]
    Scores { token: usize },
    #[error("the held-out loss is not finite: the checkpoint's weights are too large to compute with")]
    Loss,
    #[error("step {step}, rank {rank}: {excess}")]
    Budget {
        step: u64,
        rank: usize,
        excess: Box<Excess>,
        /// The most that was held until the rank looked.
        peak: u64,
    },
    #[error("going back through the model failed: {0}")]
    Backward(guildhall_tensor::BackwardError),
}

/// What the commands must know of a failure, on whatever rank it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopKind {
    /// Found before the first step: the request was wrong, not the run.
    Request,
    /// The run's own numbers, so that the same steps again would end the same way.
    Numbers,
    /// A rank came to a `peak` above the `limit` that it may hold.
    Budget {
        limit: u64,
        peak: u64,
    },
    Other,
}

impl Tellable for Error {
    type Kind = StopKind;

    fn kind(&self) -> StopKind {
        match self {
            Error::Start(_) => StopKind::Request,
            Error::NonFinite { .. } | Error::Overflow { .. } | Error::HeldOut { .. } => StopKind::Numbers,
            Error::Budget { excess, peak, .. } => StopKind::Budget { limit: excess.limit, peak: *peak },
            Error::At { error, .. } => error.kind(),
            _ => StopKind::Other,
        }
    }

    fn is_consequence(&self) -> bool {
        Error::is_consequence(self)
    }
}

impl Error {
    /// What was met with before the first step. That ranks do not reach each other is no wrong request.
    pub(super) fn before_the_first_step(self) -> Error {
        match self {
            Error::Comm(_) | Error::Checkpoint(checkpoint::Error::Comm(_)) => self,
            error => Error::Start(Box::new(error)),
        }
    }

    /// What was met with in `step`, in a part of the model if `place` says which.
    pub(super) fn at(self, step: u64, place: Option<String>) -> Error {
        let is_of_ranks = match &self {
            Error::Comm(_) | Error::Moe(moe::Error::Comm(_)) | Error::Checkpoint(checkpoint::Error::Comm(_)) => true,
            Error::Backward(failure) => failure.downcast_ref::<comm::Error>().is_some(),
            _ => false,
        };
        if is_of_ranks { Error::At { step, place, error: Box::new(self) } } else { self }
    }

    /// Whether another rank's failure was the cause.
    pub fn is_consequence(&self) -> bool {
        match self {
            Error::Comm(error) | Error::Checkpoint(checkpoint::Error::Comm(error)) => {
                matches!(error, comm::Error::Aborted { .. })
            }
            Error::Checkpoint(checkpoint::Error::OtherRank { .. }) | Error::NonFiniteElsewhere { .. } => true,
            Error::Backward(failure) => {
                matches!(failure.downcast_ref::<comm::Error>(), Some(comm::Error::Aborted { .. }))
            }
            Error::Moe(error) => error.is_consequence(),
            Error::Start(error) | Error::At { error, .. } => error.is_consequence(),
            _ => false,
        }
    }
}
