//! From a recipe to a task.

use super::layout::{Layout, Recompute, Task};
use crate::config::Config;
use crate::memory;
use crate::model::Sizes;

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
                memory::Recompute::None => Recompute::Nothing,
                memory::Recompute::Operations => Recompute::Operations(config.memory.operations().to_vec()),
                memory::Recompute::Block => Recompute::Blocks { keep: config.memory.keep_communication },
            },
            tile: config.memory.tile.map(|tile| tile as u64),
            offload: config.memory.offload,
            degrees: parallel.expert.clone(),
            owners: parallel.expert_table.clone(),
            drop_duplicates: config.moe.as_ref().is_some_and(|moe| moe.drop_duplicates),
            ..Layout::of(mesh, parallel.bucketing())
        };
        let predicted = match config.data.mask_rate {
            Some(rate) if !config.model.family.is_causal() => {
                let tokens = (micro_batch * mesh.tensor * config.model.seq) as f64 / mesh.ranks as f64;
                (rate + DEVIATIONS * (rate * (1.0 - rate) / tokens.max(1.0)).sqrt()).min(1.0)
            }
            _ => 1.0,
        };
        Task { sizes, layout, rows_per_step, micro_batch, predicted }
    }
}
