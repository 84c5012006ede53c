//! Steps: rows are sent in several all-to-alls, so that experts compute on received rows while others are in flight.

use crate::moe::Schedule;
use crate::moe::plan::{Plan, RowRun, StridedRows};

/// Divides the plan's rows into steps and orders them by step; `schedules` has the schedule of each lane.
pub fn in_steps(mut plan: Plan, schedules: &[Schedule]) -> Plan {
    plan.schedule = schedules[plan.lanes.own()];
    if plan.schedule.steps() == 1 {
        return plan;
    }
    let of_step = |StridedRows { run, first, every }: StridedRows| {
        let step = run.rank.map_or(0, |rank| schedules[run.lane].step_to(rank));
        StridedRows { run: RowRun { step, ..run }, first, every }
    };
    let mut portions: Vec<StridedRows> = plan.portions().into_iter().map(of_step).collect();
    portions.sort_by_key(|portion| (portion.run.lane, portion.run.rank.is_none(), portion.run.step));
    plan.of_portions(portions)
}
