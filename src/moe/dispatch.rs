//! Tokens go to their experts.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::{Index, Indices, Var};

use super::plan::UndealtRows;
use super::{ExpertPlan, Plan};
use crate::parallel::collectives::{Underway, start_all_to_all_rows};
use crate::parallel::operands::all_gather;

/// Copies each token once per route of every step and sends the copies. By step, rows on their way to experts
/// of this rank; they arrive as the step's `sorting` says.
///
/// # Errors
/// What the group reports.
pub fn dispatch(rows: &Outgoing, plan: &ExpertPlan, group: &Arc<dyn Communicator>) -> Result<Vec<Underway>, Error> {
    plan.steps.iter().map(|step| start_all_to_all_rows(rows.of(step.rows.clone()), &step.counts, group)).collect()
}

/// Where a plan's rows are copied from.
pub struct Outgoing {
    x: Var,
    /// The row of x that is the i-th that this rank sends.
    index: Indices,
}

impl Outgoing {
    /// Rows of tokens x `[T, D]`. Where lanes share the routes, this lane's rows are taken at once, so that on the way back
    /// one gather over `tensor` brings the gradients of all.
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

    /// Some of the plan's rows.
    pub(super) fn of(&self, rows: Range<usize>) -> Var {
        self.x.gather_rows(self.index.part(rows))
    }
}
