//! What a run will hold, before its first step, and whether this machine has so much.

use guildhall_tensor::Cause;

use super::{Failure, short};
use crate::config::Config;
use crate::memory::{self, available_bytes};
use crate::model::{Counts, count};
use crate::plan::{Bytes, Load, Task, step};
use crate::train;

/// How rows are taken to be spread over ranks before any has been routed.
const EVEN: Load = Load::Even { imbalance: 1.0 };
/// Smaller micro-batches tried before a run is refused without a remedy.
const MICRO_BATCHES_TRIED: usize = 24;

/// What is known before the first step.
pub(super) struct Plan {
    pub(super) counts: Counts,
    task: Task,
    /// Of the rank that holds most, by cause.
    pub(super) bytes: Bytes,
    pub(super) predicted_bytes: u64,
    /// Of all ranks' optimizer state that is kept elsewhere.
    pub(super) elsewhere_bytes: u64,
}

impl Plan {
    /// Of a model a thousand times too large no plan is made: to walk its layers takes long.
    pub(super) fn new(config: &Config) -> Result<Plan, Failure> {
        let sizes = train::sizes(config);
        let weights = count(&sizes).total.saturating_mul(sizes.dtype.bytes() as u64);
        match available_bytes() {
            Some(available) if weights / 1024 > available => Err(Failure::Request(anyhow::anyhow!(
                "the run needs {}B for weights alone, this machine has {}B free: lower the model's sizes",
                short(weights),
                short(available)
            ))),
            _ => Ok(Plan::of(Task::of(config, sizes), config)),
        }
    }

    fn of(task: Task, config: &Config) -> Plan {
        let cost = step(&task, task.fullest(), &EVEN);
        let of_all = |bytes: u64| bytes.saturating_mul(config.parallel.ranks as u64);
        let (predicted_bytes, elsewhere_bytes) = (of_all(cost.at_peak.total()), of_all(cost.offloaded));
        Plan { counts: count(&task.sizes), task, bytes: cost.at_peak, predicted_bytes, elsewhere_bytes }
    }

    /// A run that cannot fit is refused before it makes the machine unusable. Uneven rows and the process itself take
    /// more than is predicted.
    pub(super) fn check(&self, memory: &memory::Config) -> Result<(), Failure> {
        let refused = available_bytes().and_then(|available| self.refusal(memory, available));
        refused.map_or(Ok(()), |reason| Err(Failure::Request(anyhow::anyhow!(reason))))
    }

    /// Why a machine with so much memory free cannot hold the run. Ranks that are threads keep state of `offload = "host"`
    /// in the same memory.
    fn refusal(&self, memory: &memory::Config, available: u64) -> Option<String> {
        let host = if memory.offload == memory::Offload::Host { self.elsewhere_bytes } else { 0 };
        let needed = self.predicted_bytes.saturating_add(host);
        if needed <= available - available / 8 {
            return None;
        }
        let ranks = self.task.layout.mesh.ranks as u64;
        let largest = Cause::ALL.iter().copied().max_by_key(|&cause| self.bytes.of(cause)).unwrap_or(Cause::Other);
        let kept = if host == 0 {
            String::new()
        } else {
            format!("; memory.offload = \"host\" keeps {}B of them, \"file\" would keep none", short(host))
        };
        Some(format!(
            "the run needs {}B and an eighth to spare, this machine has {}B free; of each rank's {}B most is {} ({}B){kept}: {}",
            short(needed),
            short(available),
            short(self.bytes.total()),
            largest.name(),
            short(self.bytes.of(largest)),
            self.remedy(available.saturating_sub(host) / ranks)
        ))
    }

    /// The layout of as many ranks that fits with the largest micro-batch, if one does.
    fn remedy(&self, memory: u64) -> String {
        let usable = memory - memory / 8;
        let rows = self.task.rows_per_step;
        let smaller = (1..=self.task.micro_batch).rev().filter(|micro| rows.is_multiple_of(*micro));
        let fits = |&micro_batch: &usize| {
            let task = Task { micro_batch, ..self.task.clone() };
            step(&task, task.fullest(), &EVEN).at_peak.total() <= usable
        };
        match smaller.take(MICRO_BATCHES_TRIED).find(fits) {
            Some(micro_batch) => format!("train.micro_batch = {micro_batch} fits"),
            None => {
                "no micro-batch fits: lower the model's sizes, or ask guildhall plan --search for a mesh".to_owned()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    /// State in host memory is in this machine's; in files it is not.
    #[test]
    fn what_is_kept_in_host_memory_has_to_fit_too() {
        let recipe = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/modes/e_z_off_m.toml");
        let mut config = config::load(&recipe, &[], None).expect("a recipe").config;
        let plan = Plan::of(Task::of(&config, train::sizes(&config)), &config);
        // As docs/zero.md has it of a rank.
        assert_eq!(plan.elsewhere_bytes, 4 * 8_076_032);
        let refusal = |memory: &memory::Config, bytes: u64| plan.refusal(memory, bytes / 7 * 8 + 8);
        assert_eq!(refusal(&config.memory, plan.predicted_bytes + plan.elsewhere_bytes), None);
        let refused = refusal(&config.memory, plan.predicted_bytes + plan.elsewhere_bytes / 2).expect("too little");
        assert!(refused.contains("keeps 32.3 MB of them"), "{refused}");
        config.memory.offload = memory::Offload::File;
        assert_eq!(refusal(&config.memory, plan.predicted_bytes), None);
    }
}
