//! The loss on held-out rows.

use guildhall_tensor::{Device, Tape};
use std::sync::Arc;

use super::error::Error;
use crate::data::{Source, eval_batches};
use crate::model::{Context, Model};
use crate::parallel::Mesh;

/// Mean cross-entropy per valid token over the first `rows` rows (all, if there are fewer), the same whatever the
/// mesh. Collective. NaN where no token counts.
///
/// # Errors
/// Rows that cannot be read, or what a group reports.
pub fn held_out_loss(
    model: &Model,
    device: &Arc<Device>,
    mesh: &Mesh,
    source: &dyn Source,
    (rows, micro_batch): (usize, usize),
) -> Result<f64, Error> {
    let mut sums = [0.0, 0.0];
    for batch in eval_batches(source, rows, micro_batch, mesh.data.rank(), mesh.data.size())? {
        let batch = batch?;
        let valid = batch.valid() as u64;
        // The mean over this rank's tokens of this batch, times their number: a sum that others add to.
        let context = Context::of_inference(mesh, valid);
        let forward = model.forward(&Tape::inference(device), &batch, &context)?;
        sums[0] += f64::from(forward.cross_entropy()) * valid as f64;
        sums[1] += valid as f64;
    }
    mesh.data.sum_f64(&mut sums)?;
    Ok(sums[0] / sums[1])
}
