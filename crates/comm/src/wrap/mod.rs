//! Communicators around communicators: each changes one thing and passes the rest on.

mod bytes;
mod cost;
mod fault;
mod trace;

pub use cost::{Cost, Link, Network};
pub use fault::{Death, Fault, Faults};
pub use trace::{Ledger, Trace, Traffic};
