//! What keeps a search from coming to a report.

use std::path::PathBuf;

use super::layouts::MOST;
use crate::moe::recording;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("could not use {}: {source}; choose another run.dir or make room there", path.display())]
    Folder { path: PathBuf, source: std::io::Error },
    #[error("the recipe cannot run on one rank, which others are compared with: {0}")]
    Reference(String),
    #[error(
        "--full: {combinations} combinations are more than {MOST}, and would take too long; draw some of them, with \
         --full --sample 1000, or let fewer vary: --only"
    )]
    TooMany { combinations: usize },
    #[error("the bug {bug} cannot show: no layout of the search {lacks}{why}")]
    Unplantable { bug: &'static str, lacks: &'static str, why: String },
    #[error("the run on one rank, which others are compared with, failed: {0}")]
    Run(String),
    #[error("could not start {words}: {source}; install a launcher of MPI, or name another: --launcher")]
    Launcher { words: String, source: std::io::Error },
    #[error(transparent)]
    Recording(#[from] recording::Error),
}

impl Error {
    /// Whether the request was wrong, not a run.
    pub fn is_request(&self) -> bool {
        !matches!(self, Error::Run(_))
    }
}
