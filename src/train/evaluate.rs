//! The loss on held-out rows, of a whole split or of each part of it.

use guildhall_tensor::{Device, Tape};
use std::sync::Arc;

use super::error::Error;
use crate::data::tasks::PartLabel;
use crate::data::{Source, eval_batches};
use crate::metrics::TaskRecord;
use crate::model::{Context, Forward, Model};
use crate::parallel::Mesh;

/// Held-out rows with a loss of their own.
pub struct HeldOutPart {
    /// None of a split that is not in parts.
    pub label: Option<PartLabel>,
    /// Whether it has a share in the loss of all.
    pub counts: bool,
    /// May be none of a part.
    pub rows: Arc<dyn Source>,
}

/// What an evaluation came to.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldOutLosses {
    /// Mean cross-entropy per valid token of the parts that count; NaN where no token does.
    pub loss: f64,
    pub rows: usize,
    /// Of the parts that have a label.
    pub tasks: Vec<TaskRecord>,
}

/// The losses of all parts over the first `rows` rows of each (all, if there are fewer). Collective.
///
/// # Errors
/// As [`held_out_loss`].
pub fn held_out_losses(
    model: &Model,
    device: &Arc<Device>,
    mesh: &Mesh,
    parts: &[HeldOutPart],
    (rows, micro_batch): (usize, usize),
) -> Result<HeldOutLosses, Error> {
    let mut all = HeldOutLosses { loss: f64::NAN, rows: 0, tasks: Vec::new() };
    let mut sums = [0.0, 0.0];
    for HeldOutPart { label, counts, rows: source } in parts {
        let [loss, tokens] = loss_and_tokens(model, device, mesh, source.as_ref(), (rows, micro_batch))?;
        let rows = rows.min(source.len());
        if *counts {
            sums = [sums[0] + loss, sums[1] + tokens];
            all.rows += rows;
        }
        if let Some(PartLabel { task, from, to }) = label.clone() {
            let loss = (tokens > 0.0).then_some(loss / tokens);
            all.tasks.push(TaskRecord { task, from, to, rows: rows as u64, tokens: tokens as u64, loss });
        }
    }
    all.loss = sums[0] / sums[1];
    Ok(all)
}

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
    rows: (usize, usize),
) -> Result<f64, Error> {
    let [loss, tokens] = loss_and_tokens(model, device, mesh, source, rows)?;
    Ok(loss / tokens)
}

/// The sum of the cross-entropy of all valid tokens, and their number.
fn loss_and_tokens(
    model: &Model,
    device: &Arc<Device>,
    mesh: &Mesh,
    source: &dyn Source,
    rows: (usize, usize),
) -> Result<[f64; 2], Error> {
    let mut sums = [0.0, 0.0];
    for_each_batch(model, device, mesh, source, rows, |forward, valid| {
        // The mean over this rank's tokens of this batch, times their number: a sum that others add to.
        sums[0] += f64::from(forward.cross_entropy()) * valid as f64;
        sums[1] += valid as f64;
    })?;
    mesh.data.sum_f64(&mut sums)?;
    Ok(sums)
}

/// Runs the model over this rank's batches of the first `rows` rows (all, if there are fewer). `told` gets what it came to
/// and the number of valid tokens. Collective.
///
/// # Errors
/// Rows that cannot be read, or what a group reports.
pub(super) fn for_each_batch(
    model: &Model,
    device: &Arc<Device>,
    mesh: &Mesh,
    source: &dyn Source,
    (rows, micro_batch): (usize, usize),
    mut told: impl FnMut(&Forward, u64),
) -> Result<(), Error> {
    for batch in eval_batches(source, rows, micro_batch, mesh.data.rank(), mesh.data.size())? {
        let batch = batch?;
        let valid = batch.valid() as u64;
        told(&model.forward(&Tape::inference(device), &batch, &Context::of_inference(mesh, valid))?, valid);
    }
    Ok(())
}
