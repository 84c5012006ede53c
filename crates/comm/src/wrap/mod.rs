//! Communicators around communicators: each changes one thing and passes the rest on.

mod fault;
mod trace;

pub use fault::{Death, Fault, Faults};
pub use trace::{Ledger, Trace, Traffic};
