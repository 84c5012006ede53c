//! Memory: what a run will need, from its configuration alone, and what the machine has.

mod config;
mod estimate;
mod machine;

pub use config::{Config, Offload};
pub use estimate::{Estimate, Load, estimate};
pub use machine::available_bytes;
