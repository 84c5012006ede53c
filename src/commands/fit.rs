//! Whether a run fits where it is to run, and what would.

use super::{Failure, machine, short};
use crate::config::Config;
use crate::memory::available_bytes;
use crate::plan::{Candidate, Cost, Load, Machine, Task, search};

/// How rows are taken to be spread over ranks before any has been routed.
pub(super) const EVEN: Load = Load::Even { imbalance: 1.0 };

/// Refuses a run of which a rank needs more than it may hold, before it makes the machine unusable. Uneven rows and the
/// process itself take more than is planned, hence the eighth to spare.
pub(super) fn check(config: &Config, task: &Task, cost: &Cost) -> Result<(), Failure> {
    // Without a look at the machine's speed where everything fits.
    let budget = config.memory.budget_bytes().unwrap_or(u64::MAX);
    let free = available_bytes().map_or(u64::MAX, |free| free / task.layout.mesh.ranks as u64);
    if cost.at_peak.total() <= budget && cost.at_peak.total().saturating_add(cost.offloaded) <= free - free / 8 {
        return Ok(());
    }
    let machine = machine::named(machine::HERE, config)?;
    if machine.holds(task.layout.offload, cost) {
        return Ok(());
    }
    Err(Failure::Request(anyhow::anyhow!("{}; {}", shortage(task, cost, &machine), remedy(task, &machine))))
}

/// Which rank needs what, and how much it may hold.
fn shortage(task: &Task, cost: &Cost, machine: &Machine) -> String {
    let (largest, ranks) = (cost.at_peak.largest(), task.layout.mesh.ranks);
    let may = match machine.budget {
        Some(budget) if cost.at_peak.total() > budget => format!("memory.budget lets it hold {}B", short(budget)),
        _ => format!(
            "this machine has {}B free for {ranks} rank{}, an eighth to spare",
            short(machine.memory.saturating_mul(ranks as u64)),
            if ranks == 1 { "" } else { "s" }
        ),
    };
    format!(
        "rank {} would need {}B, most of it {} ({}B); {may}",
        task.fullest(),
        short(machine.needs(task.layout.offload, cost)),
        largest.name(),
        short(cost.at_peak.of(largest))
    )
}

/// What would fit of as many ranks, or comes nearest.
pub(super) fn remedy(task: &Task, machine: &Machine) -> String {
    proposal(&search(task, machine, &EVEN))
}

/// The first of a search, in words.
pub(super) fn proposal(found: &[Candidate]) -> String {
    let Some(first) = found.first() else { return "no layout of as many ranks is possible".to_owned() };
    let set: Vec<String> = first.set.iter().map(|set| format!("--set {set}")).collect();
    let set = if set.is_empty() { "the recipe as it is".to_owned() } else { set.join(" ") };
    let bytes = short(first.bytes.total());
    if first.fits {
        return format!("what fits: {set} ({bytes}B a rank, {:.2} ms a step by the plan)", first.seconds * 1e3);
    }
    let largest = first.bytes.largest();
    format!(
        "none of {} layouts tried fits; nearest comes {set} with {bytes}B a rank, most of it {} ({}B): take more \
         ranks, or lower the model's sizes",
        found.len(),
        largest.name(),
        short(first.bytes.of(largest))
    )
}
