//! Rewrites: functions from a plan to a plan. Each states one idea of how rows travel, in a file of its own, and knows
//! nothing of the others; what executes plans knows none of them by name.
//!
//! ```text
//!  routing -> Plan::new -> shadow -> deal -> in_steps -> deliver -> exchange
//!             by owner     stay      lanes   steps       homes      counts
//! ```

pub mod duplicates;
pub mod migration;
pub mod schedule;
pub mod shadowing;
