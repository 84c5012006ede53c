//! What a run will cost before it begins: bytes by cause, messages, time; and which layout of a model on ranks is best.
//!
//! ```text
//!  Task: model, layout, rows ──▶ step: the real trainer, on a device and in a world ──▶ StepCost: bytes, messages, work
//!                                      that know sizes alone                           │
//!                                script: what it decides, and what others tell it      ▼
//!                                        (rows spread evenly, skewed, as counted)     time, links, search
//! ```

mod books;
mod concentrated;
mod devices;
mod layout;
mod links;
mod recipe;
mod recorded;
mod script;
mod search;
mod sent;
mod settings;
mod step;
mod time;
mod together;

pub use crate::memory::Offload;
pub use crate::parallel::collectives::RowCounts;
pub use books::{Bytes, Messages, ModelPart, PlannedTraffic, When, traffic};
pub use devices::{FigureOrigin, FigureOrigins, LinkSpeed, Machine, names};
pub use layout::{CondensedRows, LayerTable, Layout, Load, RankRows, RecomputePolicy, Task};
pub use links::message;
pub use recorded::{Recorded, RecordedFiles};
pub use search::{Candidate, search};
pub use step::{StepCost, pairs, step, step_of};
pub use time::{Seconds, seconds};
