//! How much held-out text goes to each expert.

use guildhall_tensor::{Device, Tape};
use std::sync::Arc;

use super::HeldOutPart;
use super::error::Error;
use crate::data::eval_batches;
use crate::model::{Context, Model};
use crate::parallel::Mesh;

/// For each MoE layer, the routes that chose each expert over the first `rows` rows of each part (all, if there are fewer),
/// the same on all ranks. Collective.
///
/// # Errors
/// Rows that cannot be read, or what a group reports.
pub fn held_out_loads(
    model: &Model,
    device: &Arc<Device>,
    mesh: &Mesh,
    parts: &[HeldOutPart],
    (rows, micro_batch): (usize, usize),
) -> Result<Vec<Vec<f64>>, Error> {
    let sizes = model.sizes();
    let sections = (0..sizes.model.layers).filter_map(|layer| sizes.moe_of(layer));
    let experts: Vec<usize> = sections.map(|moe| moe.experts).collect();
    let mut sums = vec![0.0; experts.iter().sum()];
    for part in parts {
        for batch in eval_batches(part.rows.as_ref(), rows, micro_batch, mesh.data.rank(), mesh.data.size())? {
            let batch = batch?;
            let context = Context::of_inference(mesh, batch.valid() as u64);
            let forward = model.forward(&Tape::inference(device), &batch, &context)?;
            let chosen = forward.loads.iter().flat_map(|layer| &layer.counts.load);
            sums.iter_mut().zip(chosen).for_each(|(sum, &routes)| *sum += routes as f64);
        }
    }
    mesh.data.sum_f64(&mut sums)?;
    let mut rest = sums.into_iter();
    Ok(experts.into_iter().map(|experts| rest.by_ref().take(experts).collect()).collect())
}
