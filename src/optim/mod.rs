//! The optimizer: an update rule on one weight's state, where state is kept, the learning rate's shape, and the step over
//! all weights.
//!
//! ```text
//!  Optimizer::step ── StateWalk ────────┬─ on the device: where they lie
//!    AdamW on each tile, in place       └─ Away: staging memory <── a thread ──> Backing: host memory, a file
//! ```

mod away;
mod backing;
mod error;
mod mover;
mod schedule;
mod shard;
mod state;
mod store;

pub use away::Moved;
pub use backing::OffloadTarget;
pub use error::Error;
pub use schedule::{Decay, LearningRate};
pub use shard::{Access, Shard};
pub use state::{Hyper, Optimizer, Settings, Strip};
pub use store::{StateTile, StateWalk};
