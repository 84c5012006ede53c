//! Memory: what a run keeps and makes again, and what the machine has.

mod config;
mod machine;
mod recompute;

pub use config::{Budget, Config, Offload, RecomputeMode, RecomputedOp};
pub use machine::available_bytes;
