//! Ranks and what they share: the mesh, the collectives on the tape, where each parameter lives, gradient sync.
//!
//! `shape` says who is in which group, as integers; `mesh` makes communicators of it; a `Placement` says which of
//! them a parameter concerns. `collectives` move rows and parts of weights, `operands` go between the forms in which a
//! tensor group holds a value, and a `Stream` says which form tokens have between sub-layers, and in its `Rows` which they are.

mod buckets;
mod bytes;
pub mod collectives;
mod config;
mod degrees;
mod experts;
mod flight;
mod grad_sync;
mod lent;
mod mesh;
mod migration;
mod nodes;
pub mod operands;
mod packing;
mod per_layer;
mod placement;
mod rates;
mod reassign;
mod relocation;
mod residency;
mod rows;
mod shape;
mod stage;
mod stream;
mod touched;
mod ways;
mod weight;
mod zero;

pub use buckets::{Bucket, Queue, SyncPlan};
pub(crate) use bytes::cut;
pub use bytes::{gather_bytes, gather_numbers};
pub use config::{AllToAll, Backend, Bucketing, Config, Exchange, GpuTransport, LinkCost, Migrate, NodeLink, PerLayer};
pub use experts::ExpertTable;
pub(crate) use flight::Flight;
pub use grad_sync::{
    GradientSync, Landing, Sums, global_gradient_norm, global_norm, gradient_squares, norm_tiles, sync_gradients,
};
pub(crate) use lent::NcclCarrier;
pub use mesh::Mesh;
pub use migration::{HeldSequences, Hosts, Migration};
pub use nodes::Nodes;
pub use packing::{Packing, share};
pub use placement::{ContiguousRun, Piece, Placement, Slice, Spread};
pub use rates::Rates;
pub use reassign::{largest_load, reassigned};
pub use relocation::Relocation;
pub use residency::Residency;
pub use rows::Rows;
pub use shape::{Axis, MeshShape, Order, Place};
pub use stage::Zero;
pub use stream::Stream;
pub use touched::TouchedRows;
pub use ways::MeasuredWays;
pub use weight::{Buffer, Init, Parameters, Weight};
pub use zero::{Gathering, gather_weights};
