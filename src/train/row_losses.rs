//! The losses of a step's rows, for whoever adds them up by the parts of tasks.

use std::sync::Arc;

use guildhall_tensor::{Cause, Device, Tensor};

use crate::model::Forward;

/// Of the rows that came to this rank's head, each at its place in the step; with sequences that migrate these are others
/// than the rank loaded.
#[derive(Clone, Debug, Default)]
pub struct RowSums {
    /// Rows of a step; 0 if their losses are not told apart.
    told: usize,
    /// Of the last step, by place; 0 for rows of other ranks.
    last: Vec<f32>,
}

impl RowSums {
    /// For steps of so many rows.
    pub fn of_steps(told: usize) -> RowSums {
        RowSums { told, last: Vec::new() }
    }

    pub(super) fn are_told(&self) -> bool {
        self.told > 0
    }

    /// For the sums of one step, which stay on the device until the host looks at all that a step made.
    pub(super) fn begin(&self, device: &Arc<Device>) -> Tensor {
        let _charge = device.charge(Cause::Other);
        Tensor::zeros(device, &[self.told])
    }

    /// Notes the rows of a micro-batch.
    pub(super) fn add(sums: &mut Tensor, forward: &Forward) {
        let Some(rows) = &forward.rows else { return };
        sums.copy_parts(&rows.sums, rows.places.len(), rows.places.iter().copied().zip((0..).map(|row| row..row + 1)));
    }

    /// Keeps what the host found.
    pub(super) fn end(&mut self, sums: Vec<f32>) {
        self.last = sums;
    }

    /// Of the last step: the places of rows that were here, and their summed cross-entropy.
    pub fn last(&self) -> impl Iterator<Item = (usize, f64)> {
        self.last.iter().map(|&sum| f64::from(sum)).enumerate().filter(|(_, sum)| *sum != 0.0)
    }
}
