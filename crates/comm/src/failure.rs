//! Why a rank gave no result, whatever ranks are.

use std::fmt;

/// Why a rank gave no result.
#[derive(Debug)]
pub enum Failure<E> {
    /// Its closure returned this error.
    Returned(E),
    /// Its closure panicked.
    Panicked { rank: usize, message: String },
    /// Its device failed, which its closure has not made an error of its own.
    OfDevice { rank: usize, trouble: DeviceTrouble },
}

/// A failure of a rank's device: what a rank unwinds with for it ([`std::panic::resume_unwind`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceTrouble {
    pub reason: String,
    /// Whether another rank's failure was the cause.
    pub is_consequence: bool,
}

impl<E: fmt::Display> fmt::Display for Failure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Returned(error) => error.fmt(f),
            Failure::Panicked { rank, message } => write!(f, "rank {rank} panicked: {message}"),
            Failure::OfDevice { rank, trouble } => write!(f, "rank {rank}: {}", trouble.reason),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> std::error::Error for Failure<E> {}
