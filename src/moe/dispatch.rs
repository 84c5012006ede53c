//! Tokens go to their experts.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::Var;

use super::ExpertPlan;
use crate::parallel::collectives::all_to_all_rows;

/// Copies each token once per route, sends the copies, and sorts what arrives by expert: x `[T, D]` gives
/// `[rows of this rank's experts, D]`.
///
/// # Errors
/// What the group reports.
pub fn dispatch(x: &Var, plan: &ExpertPlan, group: &Arc<dyn Communicator>) -> Result<Var, Error> {
    let rows = all_to_all_rows(x.gather_rows(&plan.plan.tokens), &plan.counts, group)?;
    Ok(if plan.arrives_sorted() { rows } else { rows.gather_rows(&plan.by_expert) })
}
