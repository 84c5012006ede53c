//! The Mixture-of-Experts layer: who goes where (routing), what is sent (plan), and the experts that do the work.
//!
//! ```text
//!  x -> router -> gate -> plan -> dispatch -> experts -> combine -> y
//!       scores    who     what    all-to-all  grouped    all-to-all
//! ```

mod balance;
mod combine;
mod config;
mod dispatch;
mod experts;
mod gate;
mod layer;
mod plan;
mod router;

pub use balance::{BalanceLoss, Importance};
pub use combine::combine;
pub use config::{Config, Layers};
pub use dispatch::dispatch;
pub use experts::{Activation, Experts, ExpertsShape};
pub use gate::{Routing, softmax_top_k};
pub use layer::{LayerOutput, MoeLayer};
pub use plan::{ExpertPlan, Plan};
pub use router::Router;
