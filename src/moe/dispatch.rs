//! Dispatch: tokens are sent to their experts.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::{Index, Indices, Var};

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

    /// Copies a range of the rows that this rank sends.
    pub(super) fn of(&self, rows: Range<usize>) -> Var {
        self.x.gather_rows(self.index.part(rows))
    }
}
