//! Combine: results are returned and summed by weight.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::Var;

use super::{CarriedRows, Delivery, ExpertPlan, Step};
use crate::parallel::collectives::{Underway, start_all_to_all_rows};
use crate::parallel::operands::split_to_whole;

/// Sends the results of one step of [`super::dispatch`], rows `[R, D]` in the order of arrival, back to the ranks that
/// sent the rows.
///
/// # Errors
/// Any error of the group's communicator.
pub fn send_home(rows: Var, step: &Step, group: &Arc<dyn Communicator>) -> Result<Underway, Error> {
    start_all_to_all_rows(rows, &step.counts.swapped(), group)
}

/// Sends results `[R, D]`, in the order of arrival, to the destinations in `delivery`. If some carry the residual stream,
/// `load` has the rows that they are results of and the numbers that came with them.
///
/// # Errors
/// Any error of the group's communicator.
pub fn send_on(
    results: Var,
    delivery: &Delivery,
    load: Option<(&CarriedRows, [Var; 2])>,
    group: &Arc<dyn Communicator>,
) -> Result<Underway, Error> {
    let sorted = match load {
        None => results.gather_rows(&delivery.order),
        Some((carried, [rows, numbers])) => carried.load(&results, &rows, delivery, &numbers),
    };
    start_all_to_all_rows(sorted, &delivery.counts, group)
}

/// The weighted sum of each token's routes, `[T, D]`, with weights `[T, K]`. `home` has the results of every step, then
/// those of the rows that stayed: together `[R, D]` in the order of the plan or of its deliveries. If results are
/// delivered, tokens and weights are those that `Migration::carry` brings to this rank, in its order. If lanes divide
/// the routes, the results of all lanes are all-gathered over `tensor`.
///
/// # Errors
/// Any error of the group's communicator.
pub fn combine(home: Vec<Var>, plan: &ExpertPlan, weights: &Var, tensor: &Arc<dyn Communicator>) -> Result<Var, Error> {
    let rows = match <[Var; 1]>::try_from(home) {
        Ok([rows]) => rows,
        Err(several) => Var::concat_rows(several),
    };
    let rows = match &plan.rows_of_lanes()[..] {
        [_] => rows,
        lanes => split_to_whole(rows, lanes, tensor)?,
    };
    Ok(rows.weighted_sum_rows(weights, plan.places()))
}
