//! How much held-out text goes to each expert.

use guildhall_tensor::Device;
use std::sync::Arc;

use super::HeldOutPart;
use super::error::Error;
use super::evaluate::for_each_batch;
use crate::model::Model;
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
    rows: (usize, usize),
) -> Result<Vec<Vec<f64>>, Error> {
    let sizes = model.sizes();
    let experts: Vec<usize> = sizes.moe_layers().map(|(_, moe)| moe.experts).collect();
    let mut sums = vec![0.0; experts.iter().sum()];
    for part in parts {
        for_each_batch(model, device, mesh, part.rows.as_ref(), rows, |forward, _| {
            let chosen = forward.loads.iter().flat_map(|layer| &layer.counts.load);
            sums.iter_mut().zip(chosen).for_each(|(sum, &routes)| *sum += routes as f64);
        })?;
    }
    mesh.data.sum_f64(&mut sums)?;
    let mut rest = sums.into_iter();
    Ok(experts.into_iter().map(|experts| rest.by_ref().take(experts).collect()).collect())
}
