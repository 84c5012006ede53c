//! Scores kept in the folder of the run whose checkpoint they are of, where `guildhall report` finds them.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::say;
use crate::checkpoint::CHECKPOINTS;
use crate::metrics::{METRICS_FILE, SCORES_FILE, write_atomically};

/// Keeps the figures, unless the checkpoint lies in no run's folder. They have been printed: a folder that cannot be
/// written, such as somebody else's, is told and no failure.
pub(super) fn keep(checkpoint: &Path, figures: &Value) {
    let Some(run) = run_of(checkpoint) else { return };
    match write_atomically(&run.join(SCORES_FILE), format!("{figures}\n").as_bytes()) {
        Ok(()) => say(&format!("kept in {}; `guildhall report` draws it", run.join(SCORES_FILE).display())),
        Err(error) => say(&format!("note: the scores are not kept for `guildhall report`: {error}")),
    }
}

/// The run that wrote a checkpoint, by where this lies.
fn run_of(checkpoint: &Path) -> Option<PathBuf> {
    let folder = checkpoint.canonicalize().ok()?;
    let all = folder.parent().filter(|all| all.file_name().is_some_and(|name| name == CHECKPOINTS))?;
    let run = all.parent()?;
    run.join(METRICS_FILE).exists().then(|| run.to_owned())
}
