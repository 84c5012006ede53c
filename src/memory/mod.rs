//! Memory: what a run will need, from its configuration alone, and what the machine has.

mod estimate;
mod machine;

pub use estimate::{Estimate, Load, estimate};
pub use machine::available_bytes;
