//! What of a step was learned of which task.

use guildhall_comm::Error;

use crate::data::tasks::PartLabel;
use crate::data::{IGNORE, StepBatches};
use crate::metrics::TaskRecord;
use crate::parallel::Mesh;

/// Rows, valid tokens and their mean loss of each part that a step has any of, over all ranks; `losses` are the parts and
/// summed losses of the rows that came to this rank's head. Nothing is sent if there are no parts. Collective over the
/// data group: of a tensor group every rank has the same rows.
///
/// # Errors
/// What the group reports.
pub(super) fn of_step(
    batches: &StepBatches,
    losses: impl Iterator<Item = (u32, f64)>,
    parts: &[PartLabel],
    mesh: &Mesh,
) -> Result<Vec<TaskRecord>, Error> {
    if parts.is_empty() {
        return Ok(Vec::new());
    }
    let mut sums = vec![[0.0; 3]; parts.len()];
    for batch in &batches.micro {
        for (&part, targets) in batch.components.iter().zip(batch.targets.chunks_exact(batch.seq)) {
            let valid = targets.iter().filter(|&&target| target != IGNORE).count();
            let [rows, tokens, _] = &mut sums[part as usize];
            (*rows, *tokens) = (*rows + 1.0, *tokens + valid as f64);
        }
    }
    losses.for_each(|(part, loss)| sums[part as usize][2] += loss);
    mesh.data.sum_f64(sums.as_flattened_mut())?;
    let present = parts.iter().zip(sums).filter(|(_, [rows, ..])| *rows > 0.0);
    let record = |(label, [rows, tokens, loss]): (&PartLabel, [f64; 3])| {
        let PartLabel { task, from, to } = label.clone();
        let loss = (tokens > 0.0).then(|| loss / tokens);
        TaskRecord { task, from, to, rows: rows as u64, tokens: tokens as u64, loss }
    };
    Ok(present.map(record).collect())
}
