//! What a run will hold, before its first step.

use super::fit::{self, EVEN};
use super::{CommandFailure, bytes, machine, short};
use crate::config::Config;
use crate::lora::{self, Target};
use crate::memory::available_bytes;
use crate::model::{ParameterCounts, Role, count};
use crate::moe::Shadowing;
use crate::plan::{Machine, StepCost, Task, step};
use crate::train;

/// What is known before the first step.
pub(super) struct Forecast {
    pub(super) counts: ParameterCounts,
    pub(super) task: Task,
    /// Of the rank that holds most, if rows spread evenly, and if they do not yet.
    pub(super) cost: StepCost,
    pub(super) skewed: StepCost,
    pub(super) predicted_bytes: u64,
    pub(super) skewed_bytes: u64,
    /// Of all ranks' optimizer state that is kept elsewhere.
    pub(super) elsewhere_bytes: u64,
    /// Ranks that share this machine.
    neighbours: usize,
}

impl Forecast {
    /// Of a model a thousand times too large no plan is made: to walk its layers takes long.
    pub(super) fn new(config: &Config, neighbours: usize) -> Result<Forecast, CommandFailure> {
        let sizes = train::sizes(config);
        let counts = count(&sizes);
        let weights = counts.total.saturating_mul(sizes.dtype.bytes() as u64);
        match available_bytes() {
            Some(available) if weights / 1024 > available => Err(CommandFailure::Request(anyhow::anyhow!(
                "the run needs {} for weights alone, this machine has {} free: lower the model's sizes",
                bytes(weights),
                bytes(available)
            ))),
            _ => {
                let mut task = Task::of(config, sizes);
                if config.moe.as_ref().is_some_and(|moe| moe.shadowing() == Shadowing::Auto) {
                    task.layout.rates =
                        machine::named(machine::HERE, config, neighbours)?.rates(task.sizes.dtype, &task.layout.mesh);
                }
                Ok(Forecast { neighbours, ..Forecast::of(task, counts, config) })
            }
        }
    }

    fn of(task: Task, counts: ParameterCounts, config: &Config) -> Forecast {
        let [cost, skewed] = [EVEN, task.skew()].map(|load| step(&task, task.fullest(), &load));
        let of_all = |bytes: u64| bytes.saturating_mul(config.parallel.ranks as u64);
        let [predicted_bytes, skewed_bytes] = [&cost, &skewed].map(|cost| of_all(cost.at_peak.total()));
        let elsewhere_bytes = of_all(cost.offloaded);
        Forecast {
            counts,
            task,
            cost,
            skewed,
            predicted_bytes,
            skewed_bytes,
            elsewhere_bytes,
            neighbours: config.parallel.ranks,
        }
    }

    /// Floating-point operations of the rank that has most, over the whole run.
    pub(super) fn flop_of_rank(&self, config: &Config) -> f64 {
        let of_step: f64 = self.cost.work.values().map(|work| 2.0 * work.multiply_adds as f64).sum();
        of_step * config.train.steps as f64
    }

    /// How much is trained, if not all, and what is not.
    pub(super) fn trained(&self, config: &Config) -> Option<String> {
        let frozen: Vec<&str> = config.frozen().into_iter().map(Role::name).collect();
        let trained = || format!("{} parameters; frozen: {}", short(self.counts.trained), frozen.join(", "));
        match &config.lora {
            Some(lora) => Some(format!(
                "{} parameters of adapters of rank {}: {}",
                short(self.counts.trained),
                lora.rank,
                adapted(lora)
            )),
            None => (!frozen.is_empty()).then(trained),
        }
    }

    /// What would keep within the `limit` of a rank that came to its `peak`: as much more than planned is to be expected
    /// of other layouts, and an eighth is left to spare.
    pub(super) fn remedy(&self, config: &Config, limit: u64, peak: u64) -> Result<String, CommandFailure> {
        let beyond = (peak as f64 / self.skewed.at_peak.total().max(1) as f64).max(1.0);
        let budget = Some(((limit - limit / 8) as f64 / beyond) as u64);
        Ok(fit::remedy(&self.task, &Machine { budget, ..machine::named(machine::HERE, config, self.neighbours)? }))
    }
}

/// What has adapters.
fn adapted(lora: &lora::Config) -> String {
    let targets = lora.targets.0.iter().map(|target| match target {
        Target::All => "every projection",
        target => target.name(),
    });
    targets.chain(lora.experts.then_some("every expert")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use crate::plan::{Layout, Offload};

    /// State in host memory is in this machine's; in files it is not.
    #[test]
    fn what_is_kept_in_host_memory_has_to_fit_too() {
        let recipe = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/modes/e_z_off_m.toml");
        let config = config::load(&recipe, &[], None).expect("a recipe").config;
        let sizes = train::sizes(&config);
        let counts = count(&sizes);
        let plan = Forecast::of(Task::of(&config, sizes), counts, &config);
        // As docs/zero.md has it of a rank.
        assert_eq!((plan.elsewhere_bytes, plan.cost.offloaded), (4 * 10_769_408, 10_769_408));
        let holds = |offload, bytes: u64| {
            let known = Machine::known("h100").expect("a device");
            let layout = Layout { offload, ..plan.task.layout.clone() };
            Machine { memory: bytes / 7 * 8 + 8, host_memory: None, ..known }.holds(&layout, &plan.cost)
        };
        let (device, host) = (plan.cost.at_peak.total(), plan.cost.offloaded);
        assert!(holds(Offload::Host, device + host) && !holds(Offload::Host, device + host / 2));
        assert!(holds(Offload::File, device));
    }
}
