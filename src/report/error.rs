//! What can go wrong with a report.

use std::path::PathBuf;

use crate::metrics;

/// A run folder that cannot be read, or a report that cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `run` is the run that it is a part of, if any.
    #[error(
        "{} is {}: name the folder that training made, {}",
        path.display(),
        if *is_checkpoint { "a checkpoint and not a run folder" }
        else { "not a run folder, with neither config.toml nor metrics.jsonl in it" },
        run.as_ref().map_or_else(|| "such as runs/quickstart".to_owned(), |run| format!("here {}", run.display()))
    )]
    NotARun { path: PathBuf, is_checkpoint: bool, run: Option<PathBuf> },
    #[error("cannot read {}: {source}; check that it is a readable text file", path.display())]
    Config { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Metrics(#[from] metrics::Error),
}
