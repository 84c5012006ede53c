//! What can go wrong with the files of a run.

use std::path::{Path, PathBuf};

/// A metrics or summary file that cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {action} {}: {source}; check that the run folder exists, is writable and its disk not full", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error(
        "{} line {line} is not a step record: {source}; only a torn last line is repaired, so delete that line by hand",
        path.display()
    )]
    CorruptLine { path: PathBuf, line: u64, source: serde_json::Error },
    #[error(
        "{} line {line} is of step {step}, which {}; delete the lines of another run by hand",
        path.display(),
        last.map_or("no run has".to_owned(), |last| format!("cannot follow step {last}"))
    )]
    StepOrder { path: PathBuf, line: u64, step: u64, last: Option<u64> },
    #[error("{} is not a run summary: {source}; delete it, a resumed run writes it anew", path.display())]
    CorruptSummary { path: PathBuf, source: serde_json::Error },
    #[error("{} has no scores: {source}; delete it, `guildhall evaluate` with --bleu or --chrf writes it anew", path.display())]
    CorruptScores { path: PathBuf, source: serde_json::Error },
    #[error("{} is no measurement: {source}; delete it, `guildhall bench` writes it anew", path.display())]
    CorruptBench { path: PathBuf, source: serde_json::Error },
}

impl Error {
    /// Whether the file is simply not there, an ordinary case for a run that has not got that far.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    }

    /// For `map_err`: names the action and the file of an I/O error.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_owned();
        move |source| Error::Io { action, path, source }
    }
}
