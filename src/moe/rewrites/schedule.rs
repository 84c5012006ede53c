//! Steps: rows are sent in several all-to-alls, so that experts compute on received rows while others are in flight.

use crate::moe::Schedule;
use crate::moe::plan::{Plan, RowRun};

/// Divides the plan's rows into steps and orders them by step; `schedules` has the schedule of each lane.
pub fn in_steps(mut plan: Plan, schedules: &[Schedule]) -> Plan {
    plan.schedule = schedules[plan.lanes.own()];
    if plan.schedule.steps() == 1 {
        return plan;
    }
    plan.relabelled(|run| RowRun { step: run.rank.map_or(0, |rank| schedules[run.lane].step_to(rank)), ..run })
}
