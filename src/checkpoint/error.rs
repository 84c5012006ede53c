//! What can go wrong with a checkpoint.

use std::io;
use std::path::{Path, PathBuf};

/// A failure to write or read a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("could not {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is not a checkpoint: {reason}; name the folder of a checkpoint, or that of a run which has one", path.display())]
    NotACheckpoint { path: PathBuf, reason: String },
    #[error(
        "{} is a checkpoint of format {format}, this program reads formats {} to {}: read it with {}, or train anew",
        path.display(), reads.0, reads.1, which(*format, reads.1)
    )]
    Format {
        path: PathBuf,
        format: u32,
        /// The oldest and the newest.
        reads: (u32, u32),
    },
    #[error("{} is damaged ({reason}): restore it, or, if it is of a run, delete this checkpoint to continue from an older one", path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error(
        "{} files are not as they were written:\n  {}\n  restore them, or, if they are of a run, delete this checkpoint to \
         continue from an older one",
        errors.len(), listed(errors)
    )]
    Several { errors: Vec<Error> },
    #[error(
        "{} does not fit the model: {reason}; use the recipe that wrote it, or for experts where it is dense, what `guildhall surgery upcycle` makes of it",
        path.display()
    )]
    Mismatch { path: PathBuf, reason: String },
    #[error("{} exists already: nothing is overwritten, name another folder", path.display())]
    Exists { path: PathBuf },
    #[error("{} has no name a checkpoint could be given: name a folder that does not exist yet", path.display())]
    NoName { path: PathBuf },
    #[error("rank {rank} could not write the checkpoint {}: {reason}", path.display())]
    OfRank {
        path: PathBuf,
        rank: usize,
        /// Whether it is the rank that has this error.
        is_here: bool,
        reason: String,
    },
    #[error(
        "could not write {}: its file system has not answered for {seconds} s (train.checkpoint_timeout_s)",
        path.display()
    )]
    NoAnswer { path: PathBuf, seconds: u64 },
    #[error(transparent)]
    Optimizer(#[from] crate::optim::Error),
    #[error(transparent)]
    Comm(#[from] guildhall_comm::Error),
}

/// The program that reads a format which this one does not.
fn which(format: u32, newest: u32) -> &'static str {
    if format > newest { "the newer version that wrote it" } else { "the version that wrote it" }
}

/// The first faults, a line each, and how many more there are.
fn listed(errors: &[Error]) -> String {
    const SHOWN: usize = 12;
    let more = errors.len().saturating_sub(SHOWN);
    let lines = errors.iter().take(SHOWN).map(Error::fault);
    lines.chain((more > 0).then(|| format!("and {more} more"))).collect::<Vec<_>>().join("\n  ")
}

/// All that is there if nothing failed, else every failure.
pub(super) fn all_of<T>(results: impl Iterator<Item = Result<T, Error>>) -> Result<Vec<T>, Error> {
    let (mut found, mut errors) = (Vec::new(), Vec::new());
    results.for_each(|result| match result {
        Ok(one) => found.push(one),
        Err(error) => errors.push(error),
    });
    match errors.len() {
        0 => Ok(found),
        1 => Err(errors.remove(0)),
        _ => Err(Error::Several { errors }),
    }
}

impl Error {
    /// Whether files were in the way, and not the run: it can go on, and write another later.
    pub fn is_of_files(&self) -> bool {
        match self {
            Error::Several { errors } => errors.iter().all(Error::is_of_files),
            other => matches!(other, Error::Io { .. } | Error::OfRank { .. } | Error::NoAnswer { .. }),
        }
    }

    /// Whether files are not what was written, or gone: another checkpoint may be whole.
    pub fn is_damage(&self) -> bool {
        match self {
            Error::Damaged { .. } | Error::NotACheckpoint { .. } => true,
            Error::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Error::Several { errors } => errors.iter().all(Error::is_damage),
            _ => false,
        }
    }

    /// What is wrong, without what to do about it.
    pub fn fault(&self) -> String {
        match self {
            Error::Damaged { path, reason } => format!("{} is damaged ({reason})", path.display()),
            Error::NotACheckpoint { path, reason } => format!("{} is not whole ({reason})", path.display()),
            Error::Several { errors } => errors.iter().map(Error::fault).collect::<Vec<_>>().join("; "),
            other => other.to_string(),
        }
    }

    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_owned();
        move |source| Error::Io { action, path, source }
    }

    pub(super) fn damaged(path: &Path, reason: impl Into<String>) -> Error {
        Error::Damaged { path: path.to_owned(), reason: reason.into() }
    }
}
