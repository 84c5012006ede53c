//! The processes of a run in a simulated world: one rank each, and one of them at a time.

use std::time::Duration;

use guildhall_comm::simulated::{self, SimulatedEnd, SimulatedRank, Stuck, WorldScript};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::{Member, Process, Refusal};
use crate::parallel;

/// Calls `f` for each process, in the order that `script` draws.
///
/// # Errors
/// Processes that wait for ever.
pub fn simulate<T: Send>(
    config: &parallel::Config,
    script: WorldScript,
    f: impl Fn(Result<Process, Refusal>) -> T + Sync,
) -> Result<SimulatedEnd<T>, Stuck> {
    simulated::run(config.ranks, Duration::from_secs(config.timeout_s), script, |rank| {
        let SimulatedRank { world, lane, clock } = rank;
        f(Process::simulated(clock, Member { world, lane }, config))
    })
}

/// Keeps this thread, and those that it starts, on one of the cores that it may run on: of the threads of a simulated world
/// one runs at a time, and a turn is soonest handed over on the same core.
pub fn stay_on(core: usize) {
    let Ok(may) = sched_getaffinity(None) else { return };
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| may.is_set(cpu)).collect();
    let Some(&own) = cores.get(core % cores.len().max(1)) else { return };
    let mut stays = CpuSet::new();
    stays.set(own);
    // It runs anywhere else too, only slower.
    let _ = sched_setaffinity(None, &stays);
}
