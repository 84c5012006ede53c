//! Steps: rows are sent in several all-to-alls, so that experts compute on received rows while others are in flight.

use crate::moe::Schedule;
use crate::moe::plan::{Plan, RowRun, StridedRows};
use crate::moe::schedule::first_half;

/// Divides the plan's rows into steps and orders them by step; `schedules` has the schedule of each lane.
pub fn in_steps(mut plan: Plan, schedules: &[Schedule]) -> Plan {
    plan.schedule = schedules[plan.lanes.own()];
    if plan.schedule.steps() == 1 {
        return plan;
    }
    let rows_to = |lane: usize, rank: Option<usize>| {
        let rows = |run: &RowRun| if (run.lane, run.rank) == (lane, rank) { run.rows } else { 0 };
        first_half(&plan.runs.iter().map(rows).collect::<Vec<_>>())
    };
    let mut halves = Vec::with_capacity(2 * plan.runs.len());
    for (index, portion) in plan.portions().into_iter().enumerate() {
        let RowRun { lane, rank, rows, .. } = portion.run;
        let [first, second] = rank.map_or([0, 0], |rank| schedules[lane].steps_to(rank));
        let head = if first == second { rows } else { rows_to(lane, rank)[index] };
        let half = |from: usize, step: usize, rows: usize| {
            let run = RowRun { step, rows, ..portion.run };
            StridedRows { run, first: portion.first + from * portion.every, ..portion }
        };
        halves.extend([half(0, first, head), half(head, second, rows - head)]);
    }
    halves.retain(|portion| portion.run.rows > 0);
    plan.sorted(halves)
}
