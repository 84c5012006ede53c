//! Memory: what a run will need, from its configuration alone.

mod estimate;

pub use estimate::{Estimate, Load, estimate};
