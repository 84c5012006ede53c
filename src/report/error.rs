//! What can go wrong with a report.

use std::path::PathBuf;

use crate::metrics;

/// A run folder that cannot be read, or a report that cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "{} is not a run folder: it has neither config.toml nor metrics.jsonl; \
         name the folder that training made, such as runs/quickstart",
        path.display()
    )]
    NotARun { path: PathBuf },
    #[error("cannot read {}: {source}; check that it is a readable text file", path.display())]
    Config { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Metrics(#[from] metrics::Error),
}
