//! What to set in a recipe for another layout of it, as `--set` takes it: both layouts as sections of a recipe, and the keys
//! in which they differ.

use serde_json::Value;

use super::layout::{Layout, RecomputePolicy, Task};
use crate::{memory, parallel};

/// The keys in which `to` differs from the recipe that `from` is of, with their values.
pub(super) fn settings(from: &Task, to: &Task) -> Vec<String> {
    let mut set = Vec::new();
    for ((section, mine), (_, theirs)) in sections(from, from).into_iter().zip(sections(to, from)) {
        let Value::Object(theirs) = theirs else { continue };
        for (key, value) in theirs.into_iter().filter(|(key, value)| !value.is_null() && mine.get(key) != Some(value)) {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            set.push(format!("{section}.{key}={value}"));
        }
    }
    set
}

/// The sections of a recipe that say how a task's model lies on ranks. What says nothing of this layout is as in `from`.
fn sections(task: &Task, from: &Task) -> [(&'static str, Value); 4] {
    let Layout { mesh, degrees, sequence, zero, recompute, offload, tile, .. } = &task.layout;
    let sliced = task.sizes.moe.is_some() && mesh.tensor > 1;
    let parallel = parallel::Config {
        expert: degrees.clone(),
        tensor: mesh.tensor,
        expert_tensor: sliced.then_some(mesh.expert_tensor),
        sequence: *sequence,
        zero: usize::from(*zero),
        order: mesh.order,
        ..parallel::Config::of(mesh.ranks, mesh.expert)
    };
    let memory = memory::Config {
        recompute: match recompute {
            RecomputePolicy::Nothing => memory::RecomputeMode::None,
            RecomputePolicy::Operations(_) => memory::RecomputeMode::Operations,
            RecomputePolicy::Blocks { .. } => memory::RecomputeMode::Block,
        },
        keep_communication: match (recompute, &from.layout.recompute) {
            (RecomputePolicy::Blocks { keep }, _) | (_, RecomputePolicy::Blocks { keep }) => *keep,
            _ => true,
        },
        offload: *offload,
        tile: tile.or(from.layout.tile).map(|tile| tile as usize),
        budget: None,
        recompute_operations: None,
        offload_dir: None,
    };
    let mut moe = task.sizes.moe.clone();
    let layout = if sliced { &task.layout } else { &from.layout };
    moe.iter_mut().for_each(|moe| moe.drop_duplicates = layout.drop_duplicates);
    let value = |section: Result<Value, serde_json::Error>| section.expect("sections are numbers, strings and lists");
    [
        ("parallel", value(serde_json::to_value(parallel))),
        ("moe", value(serde_json::to_value(moe))),
        ("memory", value(serde_json::to_value(memory))),
        ("train", serde_json::json!({ "micro_batch": task.micro_batch, "checkpoint_async": task.layout.copies_state })),
    ]
}
