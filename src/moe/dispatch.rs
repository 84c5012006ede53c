//! Tokens go to their experts.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::Var;

use super::plan::Step;
use super::{ExpertPlan, Plan};
use crate::parallel::collectives::{Underway, start_all_to_all_rows};

/// Rows on their way to experts of this rank.
pub struct Arriving<'a> {
    rows: Underway,
    step: &'a Step,
}

/// Copies each token once per route of every step and sends the copies: x `[T, D]`.
///
/// # Errors
/// What the group reports.
pub fn dispatch<'a>(x: &Var, plan: &'a ExpertPlan, group: &Arc<dyn Communicator>) -> Result<Vec<Arriving<'a>>, Error> {
    let Plan { tokens, .. } = &plan.plan;
    let start = |step: &'a Step| {
        let rows = start_all_to_all_rows(x.gather_rows(&tokens[step.rows.clone()]), &step.counts, group)?;
        Ok(Arriving { rows, step })
    };
    plan.steps.iter().map(start).collect()
}

impl Arriving<'_> {
    /// Waits for the step's rows and sorts them by expert: `[rows of this rank's experts, D]`.
    ///
    /// # Errors
    /// What the group reports.
    pub fn sorted(self) -> Result<Var, Error> {
        let rows = self.rows.finish()?;
        Ok(if self.step.arrives_sorted() { rows } else { rows.gather_rows(&self.step.by_expert) })
    }
}
