//! Results come home and are added up by weight.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::Var;

use super::{Delivery, ExpertPlan, Step};
use crate::parallel::collectives::{Underway, start_all_to_all_rows};
use crate::parallel::operands::split_to_whole;

/// The results of one step of [`super::dispatch`], rows `[R, D]` in the order in which they had arrived, go back to where
/// the rows came from, or on to where `delivery` says.
///
/// # Errors
/// What the group reports.
pub fn send_home(
    rows: Var,
    step: &Step,
    delivery: Option<&Delivery>,
    group: &Arc<dyn Communicator>,
) -> Result<Underway, Error> {
    match delivery {
        None => start_all_to_all_rows(rows, &step.counts.swapped(), group),
        Some(delivery) => send_on(rows, delivery, group),
    }
}

/// Results `[R, D]` go to where a delivery says.
///
/// # Errors
/// What the group reports.
pub fn send_on(rows: Var, delivery: &Delivery, group: &Arc<dyn Communicator>) -> Result<Underway, Error> {
    start_all_to_all_rows(rows.gather_rows(&delivery.order), &delivery.counts, group)
}

/// The weighted sum of each token's routes. The rows of every step, then those that stayed, together in the order of
/// the plan `[R, D]`; weights `[T, K]`; gives `[T, D]`. Where results are delivered, tokens and weights are those that come
/// here, in the order in which they are carried. Where lanes have shared the routes, rows come from all of
/// `tensor`.
///
/// # Errors
/// What the group reports.
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
