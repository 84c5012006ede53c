//! Results come home and are added up by weight.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::Var;

use super::ExpertPlan;
use crate::parallel::collectives::all_to_all_rows;

/// The way back of [`super::dispatch`], then the weighted sum of each token's routes: rows `[R, D]`, weights `[T, K]`,
/// gives `[T, D]`.
///
/// # Errors
/// What the group reports.
pub fn combine(rows: Var, plan: &ExpertPlan, group: &Arc<dyn Communicator>, weights: &Var) -> Result<Var, Error> {
    let rows = if plan.arrives_sorted() { rows } else { rows.gather_rows(&plan.sorted_places()) };
    let rows = all_to_all_rows(rows, &plan.counts.swapped(), group)?;
    Ok(rows.weighted_sum_rows(weights, &plan.plan.places))
}
