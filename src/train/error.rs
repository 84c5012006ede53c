//! Why training stopped.

use std::sync::Arc;

use guildhall_comm as comm;
use guildhall_tensor::{DeviceFailure, Excess, on_device};

use serde::{Deserialize, Serialize};

use super::job::InitError;
use crate::launch::{Rank, Tellable};
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
    /// What ranks say to each other, and what devices do, does not tell in which step it was, and where in the model.
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
    /// `place` is the part of the model whose kernels were the last.
    #[error("rank {rank}, {}: {failure}", if place.is_empty() { "before the model".to_owned() } else { format!("last in {place}") })]
    Device { rank: usize, place: Arc<str>, failure: DeviceFailure },
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
    /// A rank came to a `peak` above the `limit` that it may hold, or would have where its device had no more room.
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
            // What tensors held is what there was room for.
            Error::Device { failure: DeviceFailure::NoRoom { bytes, held, .. }, .. } => {
                StopKind::Budget { limit: *held, peak: held + bytes }
            }
            Error::At { error, .. } => error.kind(),
            _ => StopKind::Other,
        }
    }

    fn is_consequence(&self) -> bool {
        Error::is_consequence(self)
    }
}

impl Error {
    /// Runs a rank's work, of which a failure of its device is an error like others. The other ranks are told at once: what
    /// the rank has begun with them may be dropped before it reports the error.
    ///
    /// # Errors
    /// Those of `work`, and [`Error::Device`].
    pub fn or_of_device<T>(rank: &Rank, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let failed = |failure| {
            let error = Error::Device { rank: rank.world.rank(), place: rank.device.scope(), failure };
            rank.world.abort(&error.to_string());
            Err(error)
        };
        on_device(work).unwrap_or_else(failed)
    }

    /// What was met with before the first step. That ranks do not reach each other is no wrong request.
    pub(crate) fn before_the_first_step(self) -> Error {
        match self {
            Error::Comm(_) | Error::Checkpoint(checkpoint::Error::Comm(_)) => self,
            error => Error::Start(Box::new(error)),
        }
    }

    /// What was met with in `step`, in a part of the model or of the step if `place` says which. Devices say so themselves.
    pub(super) fn at(self, step: u64, place: Option<String>) -> Error {
        let is_of_ranks = match &self {
            Error::Comm(_) | Error::Moe(moe::Error::Comm(_)) | Error::Checkpoint(checkpoint::Error::Comm(_)) => true,
            Error::Backward(failure) => failure.downcast_ref::<comm::Error>().is_some(),
            _ => false,
        };
        if is_of_ranks || matches!(self, Error::Device { .. }) {
            Error::At { step, place: place.filter(|_| is_of_ranks), error: Box::new(self) }
        } else {
            self
        }
    }

    /// Whether another rank's failure was the cause.
    pub fn is_consequence(&self) -> bool {
        match self {
            Error::Comm(error) | Error::Checkpoint(checkpoint::Error::Comm(error)) => {
                matches!(error, comm::Error::Aborted { .. })
            }
            Error::Checkpoint(checkpoint::Error::OfRank { is_here: false, .. })
            | Error::NonFiniteElsewhere { .. }
            | Error::Device { failure: DeviceFailure::Ended { .. }, .. } => true,
            Error::Backward(failure) => {
                matches!(failure.downcast_ref::<comm::Error>(), Some(comm::Error::Aborted { .. }))
            }
            Error::Moe(error) => error.is_consequence(),
            Error::Start(error) | Error::At { error, .. } => error.is_consequence(),
            _ => false,
        }
    }
}

/// Names the step of what was met with, and its part.
pub(super) fn within(step: u64, part: &'static str) -> impl Fn(Error) -> Error {
    move |error| error.at(step, Some(part.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As of one that holds more than memory.budget: what fits is looked for.
    #[test]
    fn a_device_without_room_is_a_budget_that_is_exceeded() {
        let failure = DeviceFailure::NoRoom { bytes: 3 << 19, held: 5 << 20, reason: "it is full".to_owned() };
        let error = Error::Device { rank: 2, place: "layer 1".into(), failure }.at(7, None);
        let told = "step 7: rank 2, last in layer 1: the device has no room for 1.50 MiB more beside the 5.00 that tensors hold";
        assert!(error.to_string().starts_with(told), "{error}");
        assert_eq!(error.kind(), StopKind::Budget { limit: 5 << 20, peak: 13 << 19 });
    }
}
