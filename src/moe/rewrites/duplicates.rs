//! Duplicates: the ranks of a tensor group see the same tokens. As lanes they divide the rows among them, so that no
//! row is sent twice.
//!
//! This is DeepSpeed-TED's dropping of duplicates (spec 3.5), without capacity slots: of an expert's routes in token
//! order, lane t sends routes t, t + T, t + 2 T, ... Sorted again, they are in the order that a single lane would have
//! sent. Without steps and shadowing the result is therefore the same bit for bit.

use guildhall_tensor::Indices;

use crate::moe::Lanes;
use crate::moe::plan::{Plan, RowRun, StridedRows, UndealtRows};

/// Divides the plan's rows among the lanes. The rows are then ordered by lane, and keep their order within a lane.
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
