//! What can be wrong with a recording.

use std::io;
use std::path::{Path, PathBuf};

/// A recording that cannot be written, or not be followed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("could not {action} the recording {}: {source}; check the path that moe.record, moe.replay or --imbalance says", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is not a recording of {reason}", path.display())]
    NotARecording { path: PathBuf, reason: String },
    #[error("moe.record would overwrite {}, which is not a recording: choose another file", .0.display())]
    WouldOverwrite(PathBuf),
    #[error(
        "moe.record and moe.replay are the same file, {}: it cannot be followed and written at once; choose another \
         moe.record",
        .0.display()
    )]
    Same(PathBuf),
    #[error(
        "{} was recorded by another run:\n  {}\nuse it with the sizes, data and seed of the run that recorded it",
        path.display(),
        differences.join("\n  ")
    )]
    Differs { path: PathBuf, differences: Vec<String> },
    #[error(
        "{} begins at step {first}, this run at step {wanted}: resume from a checkpoint of step {} or later, or use a \
         recording of the whole run",
        path.display(),
        first - 1
    )]
    Late { path: PathBuf, first: u64, wanted: u64 },
    #[error(
        "{} holds whole steps to {last} only, step {wanted} is wanted: use a whole recording, or no more train.steps than \
         it has",
        path.display()
    )]
    Short { path: PathBuf, last: u64, wanted: u64 },
    #[error(
        "{} holds the steps to {last} only, and this run continues after step {done}: bring the whole file back, or \
         delete it to record from step {} on",
        path.display(),
        done + 1
    )]
    Torn { path: PathBuf, last: u64, done: u64 },
    #[error(
        "{} is damaged at step {step}, {block}: its checksum does not fit; record anew, or replay no \
         further than step {}",
        path.display(),
        step - 1
    )]
    Damaged { path: PathBuf, step: u64, block: Box<str> },
}

impl Error {
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_owned();
        move |source| Error::Io { action, path, source }
    }
}
