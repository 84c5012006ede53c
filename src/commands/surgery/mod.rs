//! `guildhall surgery`: checkpoints become another model.

mod aggregate;
mod moefy;
mod prune;

use std::path::Path;

use guildhall_comm as comm;

use super::{CommandFailure, program, say, word};
use crate::checkpoint;
use crate::cli::{SurgeryArgs, SurgeryOperation};
use crate::config::Config;
use crate::launch::{self, Rank};
use crate::memory::available_bytes;
use crate::model::{Sizes, count};
use crate::parallel::{self, Mesh};
use crate::surgery::Error;

pub(super) fn run(arguments: SurgeryArgs) -> Result<(), CommandFailure> {
    match arguments.operation {
        SurgeryOperation::Moefy(arguments) => moefy::run(&arguments),
        SurgeryOperation::Aggregate(arguments) => aggregate::run(&arguments),
        SurgeryOperation::Prune(arguments) => prune::run(&arguments),
    }
}

/// What surgery does, it does on one rank, which has all of every tensor.
fn on_one_rank<T: Send>(
    config: &Config,
    f: impl Fn(&Rank, &Mesh) -> Result<T, Error> + Sync,
) -> Result<T, CommandFailure> {
    let one = parallel::Config { threads: config.parallel.threads, ..parallel::Config::of(1, 1) };
    let result = launch::run(&one, |rank| {
        let mesh = Mesh::new(rank.world.clone(), 1)?;
        f(&rank, &mesh)
    });
    let results = launch::first_cause(result, |_| false).map_err(|failure| match failure {
        comm::Failure::Returned(error) if is_request(&error) => CommandFailure::request(error),
        failure => CommandFailure::Run(anyhow::anyhow!("{failure}")),
    })?;
    Ok(results.into_iter().next().expect("one rank"))
}

/// Whether the request was wrong, and not the writing.
fn is_request(error: &Error) -> bool {
    !matches!(error, Error::Checkpoint(checkpoint::Error::Io { .. }) | Error::Comm(_))
}

/// Refuses a folder that exists, before any work is done.
fn check_is_new(output: &Path) -> Result<(), CommandFailure> {
    match output.symlink_metadata() {
        Ok(_) => Err(CommandFailure::request(checkpoint::Error::Exists { path: output.to_owned() })),
        Err(_) => Ok(()),
    }
}

/// Tells how to train on, in a folder with the old run's name and `suffix`.
fn tell_next(output: &Path, config: &Config, suffix: &str) {
    let recipe = word(output.join("config.toml").display());
    let init = word(format!("train.init={}", output.display()));
    let dir = word(format!("run.dir={}-{suffix}", config.run.dir.display()));
    say(&format!("next     {} train {recipe} --set {init} --set {dir}", program()));
}

/// Refuses a number of experts that is not the command's own.
fn check_set(set: &[String], instead: &str) -> Result<(), CommandFailure> {
    let of_experts = |set: &&String| set.split('=').next().is_some_and(|key| key.trim() == "moe.experts");
    match set.iter().find(of_experts) {
        Some(set) => Err(CommandFailure::Request(anyhow::anyhow!("--set {set}: {instead}; leave it out"))),
        None => Ok(()),
    }
}

/// What models held at once need, if this machine has less.
fn needs_more(models: &[&Sizes]) -> Option<String> {
    let bytes = |sizes: &&Sizes| count(sizes).total.saturating_mul(sizes.dtype.bytes() as u64);
    let needed = models.iter().map(bytes).fold(0, u64::saturating_add);
    let available = available_bytes().filter(|&available| needed > available)?;
    Some(format!("{} MB, this machine has {} MB free", needed >> 20, available >> 20))
}
