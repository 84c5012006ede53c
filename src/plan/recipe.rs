//! From a recipe to a task.

use guildhall_comm::wrap::NodeWay;

use super::layout::{Layout, RecomputePolicy, Task};
use crate::config::Config;
use crate::memory;
use crate::model::Sizes;
use crate::parallel::{AllToAll, Backend, GpuTransport, Nodes};
use crate::train;

/// Standard deviations by which a masked model's step may predict more tokens than it does on average.
const DEVIATIONS: f64 = 4.0;

impl Task {
    /// What a recipe asks of every step; `sizes` are those of its model.
    pub fn of(config: &Config, sizes: Sizes) -> Task {
        let parallel = &config.parallel;
        let mesh = parallel.shape();
        let rows_per_step = config.rows_per_step();
        let micro_batch = config.train.micro_batch.unwrap_or(rows_per_step);
        let layout = Layout {
            sequence: parallel.sequence,
            zero: parallel.zero as u8,
            recompute: match config.memory.recompute {
                memory::RecomputeMode::None => RecomputePolicy::Nothing,
                memory::RecomputeMode::Operations => RecomputePolicy::Operations(config.memory.operations().to_vec()),
                memory::RecomputeMode::Block => RecomputePolicy::Blocks { keep: config.memory.keep_communication },
            },
            tile: config.memory.tile.map(|tile| tile as u64),
            offload: config.memory.offload,
            degrees: parallel.expert.clone(),
            owners: parallel.expert_table.clone(),
            exchange: parallel.exchange,
            nodes: match parallel.node_link {
                Some(link) => Nodes::of_consecutive(mesh.ranks, link.ranks_per_node),
                None => Nodes::one(mesh.ranks),
            },
            way: match parallel.all_to_all {
                // Which is fastest a run measures, and a plan may choose: `Task::fastest_way`.
                AllToAll::Auto | AllToAll::Direct => NodeWay::Direct,
                AllToAll::TwoLevel => NodeWay::TwoLevel,
                AllToAll::TwoD => NodeWay::TwoD,
            },
            migrating: train::migrating(config),
            on_accelerators: parallel.backend != Backend::Cpu,
            sums_by_host: parallel.transport == GpuTransport::Host,
            copies_state: config.train.copies_state(),
            drop_duplicates: config.moe.as_ref().is_some_and(|moe| moe.drop_duplicates),
            ..Layout::of(mesh, parallel.bucketing())
        };
        let predicted = match config.data.mask_rate {
            Some(rate) if !config.model.is_causal() => {
                let tokens = (micro_batch * mesh.tensor * config.model.seq) as f64 / mesh.ranks as f64;
                (rate + DEVIATIONS * (rate * (1.0 - rate) / tokens.max(1.0)).sqrt()).min(1.0)
            }
            _ => 1.0,
        };
        Task { sizes, layout, rows_per_step, micro_batch, predicted }
    }
}

/// The task of one of the repository's recipes, with these keys set.
#[cfg(test)]
pub(super) fn task(recipe: &str, set: &[&str]) -> Task {
    let recipe = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes").join(recipe);
    let set: Vec<String> = set.iter().map(|set| (*set).to_owned()).collect();
    let config = crate::config::load(&recipe, &set, None).expect("a recipe").config;
    Task::of(&config, train::sizes(&config))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 2,048 tokens of a rank's micro-batch 15 % are predicted on average; four standard deviations more are planned.
    #[test]
    fn more_tokens_are_predicted_than_on_average() {
        let set = [
            "parallel.ranks=2",
            "train.micro_batch=32",
            "model.seq=128",
            "train.batch_tokens=4096",
            "data.mask_rate=0.15",
        ];
        let task = task("bert.toml", &set);
        let by_hand = 0.15 + 4.0 * (0.15f64 * 0.85 / 2048.0).sqrt();
        assert!((task.predicted - by_hand).abs() < 1e-12, "{} {by_hand}", task.predicted);
    }
}
