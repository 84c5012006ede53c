//! `scores.json`: what `guildhall evaluate` said of a checkpoint's held-out parts, kept in the run's folder.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Error, TaskRecord};

/// Name of the scores in a run folder.
pub const SCORES_FILE: &str = "scores.json";

/// The figures of a checkpoint whose texts were scored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunScores {
    /// Of the checkpoint.
    pub step: u64,
    /// The parts of the tasks.
    pub tasks: Vec<PartScores>,
}

/// A part's held-out loss, and the scores that it has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PartScores {
    #[serde(flatten)]
    pub part: TaskRecord,
    /// Texts that were written; absent where none were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sentences: Option<u64>,
    /// From 0 to 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bleu: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chrf: Option<f64>,
    /// Share of the texts that are as they should be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exact: Option<f64>,
    /// The same of labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
}

impl RunScores {
    /// Reads the scores of the folder `run`; [`Error::is_not_found`] tells a run without any.
    ///
    /// # Errors
    /// A file that is not there, or not what `evaluate` prints.
    pub fn read(run: &Path) -> Result<RunScores, Error> {
        let path = run.join(SCORES_FILE);
        let text = fs::read(&path).map_err(Error::io("read", &path))?;
        serde_json::from_slice(&text).map_err(|source| Error::CorruptScores { path, source })
    }
}
