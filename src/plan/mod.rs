//! What a run will cost before it begins: bytes by cause, messages, time; and which layout of a model on ranks is best.
//!
//! ```text
//!  Task: model, layout, rows ──▶ step: one rank's step, walked with sizes ──▶ Cost: bytes, messages, arithmetic
//!                                  model, attention, moe, transport:           │
//!                                  the model, value by value                   ▼
//!                                  ops, moves: what each op takes and keeps   time, links, search
//!                                  sketch, tape, var: tensors and tapes
//! ```

mod attention;
mod books;
mod devices;
mod layout;
mod links;
mod model;
mod moe;
mod moves;
mod ops;
mod recipe;
mod residency;
mod search;
mod settings;
mod sketch;
mod step;
mod sync;
mod tape;
mod time;
mod transport;
mod var;

pub use books::{Bytes, Messages, Part, Phase, Traffic, When, Work};
pub use devices::{Machine, Wire, names};
pub use layout::{Layout, Load, Offload, Recompute, Task};
pub use links::message;
pub use moves::RowCounts;
pub use search::{Candidate, search};
pub use step::{Cost, pairs, step, traffic};
pub use time::{Seconds, seconds};
