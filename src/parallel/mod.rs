//! Ranks and what they share: the mesh, the collectives on the tape, where each parameter lives, gradient sync.
//!
//! ```text
//!  world of R ranks, expert degree P:       ep groups  {0..P-1} {P..2P-1} ...   hold all experts together
//!  dense parameters replicated on all       edp groups {0, P, 2P, ..} {1, P+1, ..} ...   hold the same experts
//! ```

mod buckets;
pub mod collectives;
mod config;
mod experts;
mod grad_sync;
mod mesh;
mod placement;
mod rates;
mod weight;

pub use buckets::{Bucket, Queue, SyncPlan};
pub use config::{Bucketing, Config, Link, NodeLink};
pub use experts::ExpertTable;
pub use grad_sync::{GradientSync, global_gradient_norm, sync_gradients};
pub use mesh::Mesh;
pub use placement::{Piece, Placement, Spread};
pub use rates::Rates;
pub use weight::{Buffer, Init, Parameters, Weight};
