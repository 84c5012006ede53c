//! `guildhall train --restarts N`: looks after a process that trains.

use std::ffi::OsString;

use super::{CommandFailure, say};
use crate::cli::{Overrides, TrainArgs};
use crate::launch::{Ended, Launched, end_with, supervise};

/// # Errors
/// How the run ended at last, if it did not train to its end.
pub(super) fn run(arguments: TrainArgs, restarts: usize) -> Result<(), CommandFailure> {
    if let Some(Launched { by, .. }) = Launched::here() {
        return Err(CommandFailure::Request(anyhow::anyhow!(
            "--restarts looks after one process, and {by} has started several, which it ends together: start {by} again, \
             with --resume (docs/clusters.md)"
        )));
    }
    match supervise(&without_restarts(arguments), restarts, |text| say(&format!("note: {text}"))) {
        Ok(Ended::Code(0)) => Ok(()),
        Ok(Ended::Code(code)) => Err(CommandFailure::Told(code)),
        Ok(ended @ Ended::Killed { .. }) => Err(CommandFailure::Run(anyhow::anyhow!("the run {ended}"))),
        Err(error) => Err(CommandFailure::run(anyhow::Error::new(error).context("could not start the run"))),
    }
}

/// Ends this process when the one that started it has.
///
/// # Errors
/// One that has ended already.
pub(super) fn look_after(parent: Option<i32>) -> Result<(), CommandFailure> {
    parent.map_or(Ok(()), end_with).map_err(CommandFailure::run)
}

fn without_restarts(arguments: TrainArgs) -> Vec<OsString> {
    let TrainArgs { recipe, ranks, resume, restarts: _, started_by: _, backend, overrides: Overrides { set } } =
        arguments;
    let mut all: Vec<OsString> = vec!["train".into(), recipe.into()];
    ranks.iter().for_each(|ranks| all.extend(["--ranks".into(), ranks.to_string().into()]));
    backend.with(&set).into_iter().for_each(|set| all.extend(["--set".into(), set.into()]));
    all.extend(resume.then(|| "--resume".into()));
    all
}
