//! Steps: rows travel in several all-to-alls, so that experts compute what has come while the rest is under way.

use crate::moe::Schedule;
use crate::moe::plan::{Plan, RowRun, StridedRows};

/// The plan whose rows travel in steps, those of each step together, by the schedule of each lane that deals its rows.
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
