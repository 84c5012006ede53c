//! Memory: what a run keeps and makes again, what it will need, from its configuration alone, and what the machine has.

mod config;
mod estimate;
mod machine;
mod recompute;

pub use config::{Config, Offload, Operation, Recompute};
pub use estimate::{Estimate, Load, estimate};
pub use machine::available_bytes;
