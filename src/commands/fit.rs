//! Whether a run fits where it is to run, and what would.

use std::fs;

use guildhall_tensor::Cause;

use super::forecast::Forecast;
use super::{CommandFailure, bytes, duration, machine};
use crate::config::Config;
use crate::launch;
use crate::plan::{Candidate, Load, Machine, StepCost, Task, search};
use crate::train;

/// Refuses a backend that is not here, and more ranks than can run here.
pub(super) fn here(config: &Config) -> Result<(), CommandFailure> {
    launch::open_backend(config.parallel.backend, 1).map_err(CommandFailure::request)?;
    launch::transport_is_here(&config.parallel).map_err(|wrong| CommandFailure::Request(anyhow::anyhow!(wrong)))?;
    let ranks = config.parallel.ranks;
    if ranks <= launch::RANKS_MAX {
        return Ok(());
    }
    let most = launch::RANKS_MAX;
    let wrong = format!("parallel.ranks = {ranks}: a run has at most {most}, however many machines they are on");
    Err(CommandFailure::Request(anyhow::anyhow!(
        "{wrong}; take fewer, or look at what they would need with guildhall plan"
    )))
}

/// A folder for state that nobody can make is refused before an earlier run makes room for this one.
pub(super) fn offload_folder(config: &Config) -> Result<(), CommandFailure> {
    let Some(dir) = config.memory.offload_dir.as_ref().filter(|dir| !dir.starts_with(&config.run.dir)) else {
        return Ok(());
    };
    fs::create_dir_all(dir).map_err(|error| {
        let wrong = format!("memory.offload_dir = {}: {error}", dir.display());
        CommandFailure::Request(anyhow::anyhow!(
            "{wrong}; name a folder that can be written, or set memory.offload to \"host\""
        ))
    })
}

/// Rows as a router spreads them that has learned to.
pub(super) const EVEN: Load = Load::Even { imbalance: 1.0 };

/// A load in words.
pub(super) fn told(load: &Load) -> Option<String> {
    match load {
        Load::Even { imbalance } if *imbalance > 1.0 => Some(format!("{imbalance} times an even share of rows")),
        Load::Skewed { mean, most } => {
            Some(format!("{mean} times an even share of rows on average, {most} in a layer"))
        }
        Load::Zipf { exponent } => Some(format!("experts as popular as Zipf's law with exponent {exponent} says")),
        _ => None,
    }
}

/// What the recipe's run would take, with so many of its ranks on this machine. Refuses one that does not fit, as
/// [`check`] does.
pub(super) fn planned(config: &Config, neighbours: usize) -> Result<Forecast, CommandFailure> {
    let plan = Forecast::new(config, neighbours)?;
    check(config, &plan.task, neighbours, &plan.skewed)?;
    Ok(plan)
}

/// Refuses a run of which a rank needs more than it may hold, before it makes the machine unusable. The process
/// itself takes more than is planned, hence the eighth to spare.
pub(super) fn check(config: &Config, task: &Task, neighbours: usize, cost: &StepCost) -> Result<(), CommandFailure> {
    match too_small(config, task, neighbours, cost)? {
        Some(machine) => Err(CommandFailure::Request(anyhow::anyhow!(
            "{}; {}",
            shortage(task, cost, &machine),
            remedy(task, &machine)
        ))),
        None => Ok(()),
    }
}

/// What is to be set for a run to fit that does not, and go on as the run that it was: nothing where it fits, or where nothing
/// would. A resumed run keeps its micro-batch.
pub(super) fn refit(config: &Config, neighbours: usize) -> Result<Vec<String>, CommandFailure> {
    let Forecast { task, skewed, .. } = Forecast::new(config, neighbours)?;
    let Some(machine) = too_small(config, &task, neighbours, &skewed)? else { return Ok(Vec::new()) };
    let found = search(&task, &machine, &task.skew()).into_iter();
    let mut fitting = found.filter(|one| one.fits && one.micro_batch == task.micro_batch);
    Ok(fitting.next().map(|first| first.set).unwrap_or_default())
}

/// This machine, if a rank needs more of it than it may hold.
fn too_small(
    config: &Config,
    task: &Task,
    neighbours: usize,
    cost: &StepCost,
) -> Result<Option<Machine>, CommandFailure> {
    // Without a look at the machine's speed where everything fits.
    let budget = config.memory.budget_bytes().unwrap_or(u64::MAX);
    let free = train::rank_memory(config, neighbours).unwrap_or(u64::MAX);
    if cost.at_peak.total() <= budget && cost.at_peak.total().saturating_add(cost.offloaded) <= free - free / 8 {
        return Ok(None);
    }
    let machine = machine::named(machine::HERE, config, neighbours)?;
    Ok((!machine.holds(&task.layout, cost)).then_some(machine))
}

/// Which rank needs what, and how much it may hold.
fn shortage(task: &Task, cost: &StepCost, machine: &Machine) -> String {
    let (largest, ranks) = (cost.at_peak.largest(), task.layout.mesh.ranks);
    let may = match machine.budget {
        Some(budget) if cost.at_peak.total() > budget => format!("memory.budget lets it hold {}", bytes(budget)),
        _ => format!(
            "{} {} free for {ranks} rank{}, an eighth to spare",
            if machine.host_memory.is_some() { "its devices have" } else { "this machine has" },
            bytes(machine.memory.saturating_mul(ranks as u64)),
            if ranks == 1 { "" } else { "s" }
        ),
    };
    let copy = match cost.at_peak.of(Cause::Checkpoint) {
        0 => String::new(),
        copied => format!(", {} for the copy of its state that train.checkpoint_async writes", bytes(copied)),
    };
    format!(
        "rank {} would need {}, most of it {} ({}){copy}; {may}",
        task.fullest(),
        bytes(machine.needs(task.layout.offload, cost)),
        largest.name(),
        bytes(cost.at_peak.of(largest))
    )
}

/// What would fit of as many ranks, or comes nearest.
pub(super) fn remedy(task: &Task, machine: &Machine) -> String {
    proposal(task, &search(task, machine, &task.skew()))
}

/// The first of a search, in words.
pub(super) fn proposal(task: &Task, found: &[Candidate]) -> String {
    let Some(first) = found.first() else { return "no layout of as many ranks is possible".to_owned() };
    let set: Vec<String> = first.set.iter().map(|set| format!("--set {set}")).collect();
    let set = if set.is_empty() { "the recipe as it is".to_owned() } else { set.join(" ") };
    let total = bytes(first.bytes.total());
    if first.fits {
        let caution =
            caution(task, std::slice::from_ref(first)).map_or(String::new(), |caution| format!("; {caution}"));
        return format!("what fits: {set} ({total} a rank, {} a step by the plan){caution}", duration(first.seconds));
    }
    let (largest, held) = first.largest();
    let most = if first.beyond_host.is_some() { "but of a node" } else { "most of it" };
    format!(
        "none of {} layouts tried fits; nearest comes {set} with {total} a rank, {most} {largest} ({}): take more \
         ranks, or lower the model's sizes",
        found.len(),
        bytes(held)
    )
}

/// What is to be said of layouts that do not train as the recipe does.
pub(super) fn caution(task: &Task, found: &[Candidate]) -> Option<String> {
    let because = task.sizes.moe.as_ref()?.asks_the_micro_batch(&task.sizes.model.row_lengths())?;
    let changes = found.iter().any(|candidate| candidate.micro_batch != task.micro_batch);
    changes.then(|| format!("another train.micro_batch trains otherwise, not just in other bytes: {because}"))
}
