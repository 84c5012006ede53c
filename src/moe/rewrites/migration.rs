//! Migration: results are delivered to the ranks to which a migration carries their tokens, not to those that sent the
//! rows (Luffy, arXiv:2411.15419, 4.3).

use crate::moe::Plan;

/// Delivers the results of token t to rank `homes[t]` of the expert group.
pub fn deliver(plan: Plan, homes: Option<Vec<u32>>) -> Plan {
    Plan { homes, ..plan }
}
