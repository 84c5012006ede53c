//! Dispatch: tokens are sent to their experts.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::{Index, Indices, Tensor, Var};

use super::plan::UndealtRows;
use super::{ExpertPlan, Plan};
use crate::parallel::collectives::{Underway, start_all_to_all_rows};
use crate::parallel::operands::all_gather;

/// For each step, copies the step's tokens once per row and starts the all-to-all that sends the copies. At the
/// destination, rows arrive in the order that the step's `sorting` expects.
///
/// # Errors
/// Any error of the group's communicator.
pub fn dispatch(rows: &Outgoing, plan: &ExpertPlan, group: &Arc<dyn Communicator>) -> Result<Vec<Underway>, Error> {
    plan.steps.iter().map(|step| start_all_to_all_rows(rows.of(step.rows.clone()), &step.counts, group)).collect()
}

/// The tensor from which a plan's rows are copied.
pub struct Outgoing {
    x: Var,
    /// For each row that this rank sends, its row in x.
    index: Indices,
}

impl Outgoing {
    /// The rows of tokens x `[T, D]`. If lanes divide the routes, this lane's rows are copied all at once, so that in
    /// backward one all-gather over `tensor` collects the gradients of all lanes' rows.
    pub fn new(x: &Var, plan: &Plan, tensor: &Arc<dyn Communicator>) -> Outgoing {
        if plan.spreads {
            return Outgoing::spreading(x, plan, tensor);
        }
        let Some(UndealtRows { tokens, places }) = &plan.undealt else {
            return Outgoing { x: x.clone(), index: plan.tokens.clone() };
        };
        let (places, lanes, tensor, dtype) = (places.clone(), plan.rows_of_lanes(), tensor.clone(), x.dtype());
        let own = x.gather_rows_in_part([plan.own_tokens(), Index::from(tokens)], move |gradient| {
            Ok(all_gather(gradient.into_dtype(dtype), &lanes, &tensor)?.gathered_rows(&places))
        });
        let rows = own.value().rows() as u32;
        Outgoing { x: own, index: Indices::Run(0..rows) }
    }

    /// The same for a plan whose routes share rows: in backward, every token of a row receives an equal share of its
    /// gradient.
    fn spreading(x: &Var, plan: &Plan, tensor: &Arc<dyn Communicator>) -> Outgoing {
        let (places, lanes, tensor, dtype) = (plan.places.clone(), plan.rows_of_lanes(), tensor.clone(), x.dtype());
        let (tokens, shares) = (x.value().rows(), shares(x, plan));
        let own = x.gather_rows_in_part([plan.own_tokens(), Index::Run(0..tokens as u32)], move |gradient| {
            let rows = match lanes.len() {
                1 => gradient,
                _ => all_gather(gradient.into_dtype(dtype), &lanes, &tensor)?,
            };
            Ok(rows.weighted_row_sums(&shares, &places))
        });
        let rows = own.value().rows() as u32;
        Outgoing { x: own, index: Indices::Run(0..rows) }
    }

    /// Copies a range of the rows that this rank sends.
    pub(super) fn of(&self, rows: Range<usize>) -> Var {
        self.x.gather_rows(self.index.part(rows))
    }
}

/// For each route, one over the number of routes that share its row, `[T, K]`.
fn shares(x: &Var, plan: &Plan) -> Tensor {
    let routes = x.value().rows() * plan.slots;
    Tensor::from_values(x.device(), &[x.value().rows(), plan.slots], || {
        let places = plan.places.known();
        let mut sharing = vec![0u32; plan.tokens.len()];
        places.iter().filter(|row| **row != u32::MAX).for_each(|&row| sharing[row as usize] += 1);
        let share = |&row: &u32| if row == u32::MAX { 0.0 } else { 1.0 / sharing[row as usize] as f32 };
        let shares: Vec<f32> = places.iter().map(share).collect();
        assert_eq!(shares.len(), routes, "a place for each route");
        shares
    })
}
