//! What of a step was learned of which task.

use guildhall_comm::Error;

use crate::data::tasks::PartLabel;
use crate::data::{IGNORE, StepBatches};
use crate::metrics::TaskRecord;
use crate::parallel::Mesh;

/// Rows and valid tokens of each part that a step has any of, over all ranks. Nothing is sent if there are no parts.
/// Collective over the data group.
///
/// # Errors
/// What the group reports.
pub(super) fn of_step(batches: &StepBatches, parts: &[PartLabel], mesh: &Mesh) -> Result<Vec<TaskRecord>, Error> {
    if parts.is_empty() {
        return Ok(Vec::new());
    }
    let mut counts = vec![[0.0, 0.0]; parts.len()];
    for batch in &batches.micro {
        for (&part, targets) in batch.components.iter().zip(batch.targets.chunks_exact(batch.seq)) {
            let valid = targets.iter().filter(|&&target| target != IGNORE).count();
            let [rows, tokens] = &mut counts[part as usize];
            (*rows, *tokens) = (*rows + 1.0, *tokens + valid as f64);
        }
    }
    mesh.data.sum_f64(counts.as_flattened_mut())?;
    let present = parts.iter().zip(counts).filter(|(_, [rows, _])| *rows > 0.0);
    let record = |(label, [rows, tokens]): (&PartLabel, [f64; 2])| {
        let PartLabel { task, from, to } = label.clone();
        TaskRecord { task, from, to, rows: rows as u64, tokens: tokens as u64, loss: None }
    };
    Ok(present.map(record).collect())
}
