//! The recipe of a run as its launcher has it: a run may have other ranks than its recipe was written for, and where the
//! recipe's layout takes more memory than they have, it is the planner's.

use super::CommandFailure;
use super::fit;
use crate::cli::TrainArgs;
use crate::config::{self, Config, Loaded};
use crate::launch::{Launched, Process};

/// The recipe with what the command line sets, and then `more`.
pub(super) fn load(arguments: &TrainArgs, more: &[String]) -> Result<Loaded, CommandFailure> {
    let processes = Launched::here().map(|launched| launched.size);
    let set = [arguments.backend.with(&arguments.overrides.set), more.to_vec()].concat();
    config::load_launched(&arguments.recipe, &set, arguments.ranks, processes).map_err(CommandFailure::request)
}

/// The recipe as it fits the processes of an elastic run. What fits is found by the one that leads: others may measure their
/// machine otherwise. Collective over the processes.
pub(super) fn fitted(process: &Process, loaded: Loaded, arguments: &TrainArgs) -> Result<Loaded, CommandFailure> {
    if Launched::here().is_none() {
        return Ok(loaded);
    }
    let config = &loaded.config;
    process.same_lines("recipes", &config.to_toml())?;
    if !config.train.elastic {
        return Ok(loaded);
    }
    let here = Config { parallel: process.with_threads(&config.parallel), ..config.clone() };
    let refit = || fit::refit(&here, process.neighbours()).map(|set| set.join("\n")).map_err(CommandFailure::refusal);
    let set: Vec<String> = process.as_leader(refit)?.lines().map(str::to_owned).collect();
    if set.is_empty() {
        return Ok(loaded);
    }
    let mut fitted = load(arguments, &set)?;
    fitted.notices.push(format!(
        "the recipe's layout does not fit the memory of {} ranks: train.elastic takes one that does, --set {}",
        config.parallel.ranks,
        set.join(" --set ")
    ));
    Ok(fitted)
}
