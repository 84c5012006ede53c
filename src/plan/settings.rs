//! What to set in a recipe for another layout of it, as `--set` takes it.

use super::layout::{Layout, Offload, Recompute, Task};
use crate::parallel::Order;

/// The keys in which `to` differs from the recipe that `from` is of, with their values.
pub(super) fn settings(from: &Task, to: &Task) -> Vec<String> {
    let (mine, Layout { mesh, sequence, zero, .. }) = (&from.layout, &to.layout);
    let mut set = Vec::new();
    let mut key = |differs: bool, key: &str, value: &dyn std::fmt::Display| {
        if differs {
            set.push(format!("{key}={value}"));
        }
    };
    key(mesh.tensor != mine.mesh.tensor, "parallel.tensor", &mesh.tensor);
    key(to.layout.degrees != mine.degrees, "parallel.expert", &mesh.expert);
    let slices = (mesh.tensor, mesh.expert_tensor) != (mine.mesh.tensor, mine.mesh.expert_tensor);
    let sliced = to.sizes.moe.is_some() && mesh.tensor > 1;
    key(sliced && slices, "parallel.expert_tensor", &mesh.expert_tensor);
    let order = if mesh.order == Order::DataExpert { "data_expert" } else { "expert_data" };
    key(mesh.order != mine.mesh.order, "parallel.order", &order);
    key(*sequence != mine.sequence, "parallel.sequence", sequence);
    let drops = to.layout.drop_duplicates;
    key(sliced && drops != mine.drop_duplicates, "moe.drop_duplicates", &drops);
    key(*zero != mine.zero, "parallel.zero", zero);
    let again = |recompute: &Recompute| match recompute {
        Recompute::Nothing => "none",
        Recompute::Operations(_) => "operations",
        Recompute::Blocks { .. } => "block",
    };
    let recompute = &to.layout.recompute;
    key(again(recompute) != again(&mine.recompute), "memory.recompute", &again(recompute));
    if let Recompute::Blocks { keep } = recompute {
        let kept = !matches!(mine.recompute, Recompute::Blocks { keep: false });
        key(*keep != kept, "memory.keep_communication", keep);
    }
    let place = match to.layout.offload {
        Offload::Nowhere => "none",
        Offload::Host => "host",
        Offload::File => "file",
    };
    key(to.layout.offload != mine.offload, "memory.offload", &place);
    if let Some(tile) = to.layout.tile {
        key(to.layout.tile != mine.tile, "memory.tile", &tile);
    }
    key(to.micro_batch != from.micro_batch, "train.micro_batch", &to.micro_batch);
    set
}
