//! Why a rank gave no result, whatever ranks are.

use std::fmt;

/// Why a rank gave no result.
#[derive(Debug)]
pub enum Failure<E> {
    /// Its closure returned this error.
    Returned(E),
    /// Its closure panicked.
    Panicked { rank: usize, message: String },
}

impl<E: fmt::Display> fmt::Display for Failure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Returned(error) => error.fmt(f),
            Failure::Panicked { rank, message } => write!(f, "rank {rank} panicked: {message}"),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> std::error::Error for Failure<E> {}
