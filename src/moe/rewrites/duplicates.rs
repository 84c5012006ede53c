//! Duplicates: the ranks of a tensor group see the same tokens. As lanes they deal the rows among them, so that none
//! travels twice.
//!
//! Dropping duplicates is DeepSpeed-TED's (spec 3.5), without slots: of an expert's routes in the order of their tokens,
//! lane t sends numbers t, t + T, t + 2 T, ... Sorted again they are what one lane would have sent, so no bit changes.

use guildhall_tensor::Indices;

use crate::moe::Lanes;
use crate::moe::plan::{Plan, RowRun, StridedRows, UndealtRows};

/// The plan of one lane of several that deal its rows among them. Lane after lane, rows keep their order.
pub fn deal(mut plan: Plan, lanes: Lanes) -> Plan {
    plan.lanes = lanes;
    let count = lanes.sharing();
    if count == 1 {
        return plan;
    }
    let of_lane = |lane: usize| {
        let portion = move |StridedRows { run, first, .. }: StridedRows| {
            let run = RowRun { lane, rows: lanes.of(run.rows, lane), ..run };
            StridedRows { run, first: first + lane, every: count }
        };
        plan.portions().into_iter().map(portion).filter(|portion| portion.run.rows > 0)
    };
    let portions = (0..count).flat_map(of_lane).collect();
    let rows = plan.tokens.len();
    let places = match plan.tokens {
        Indices::Counted(_) => Indices::Counted(rows),
        _ => Indices::Known((0..rows as u32).collect()),
    };
    plan.undealt = Some(UndealtRows { tokens: plan.tokens.clone(), places });
    plan.of_portions(portions)
}
