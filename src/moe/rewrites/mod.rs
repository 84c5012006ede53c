//! Rewrites: functions from a plan to a plan. Each has a file of its own, changes one thing about how rows are sent,
//! and does not depend on the others. The code that executes plans does not depend on any of them.
//!
//! ```text
//!  routing -> Plan::new -> condense -> shadow -> deal -> in_steps -> deliver -> exchange
//!             by owner     shared      stay      lanes   steps       homes      counts
//! ```

pub mod condensation;
pub mod duplicates;
pub mod migration;
pub mod schedule;
pub mod shadowing;
