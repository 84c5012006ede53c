//! The Mixture-of-Experts layer: who goes where (routing), what is sent (plan), and the experts that do the work.
//!
//! ```text
//!  x -> router -> gate -> plan -> dispatch -> experts -> combine -> y
//!       scores    who     what    all-to-all  grouped    all-to-all
//! ```

mod balance;
mod beside;
pub mod capacity;
mod carrying;
mod combine;
pub mod condensation;
mod config;
mod counts;
mod deliveries;
mod dialect;
mod digests;
mod dispatch;
mod error;
mod exchange;
mod expert_adapters;
mod experts;
pub mod gates;
mod homes;
mod lanes;
mod layer;
mod layer_config;
pub mod migration;
mod output_masking;
pub mod plan;
pub mod recording;
pub mod rewrites;
mod router;
mod routing;
mod schedule;
mod state;
mod step_facts;
mod steps;
mod transport;
mod weighting;

pub use balance::{BalanceLoss, Importance, LossInputs};
use beside::Besides;
pub use beside::{Beside, Proportions, SharedGate};
pub use capacity::{Capacity, Claims};
pub use carrying::{CarriedRows, Carrying, ResidualStream, RowNorm};
pub use combine::{combine, send_home, send_on};
pub use condensation::{Clusters, Condensation, Condense, CondenseGradient, Condensed, History, LossTrend};
pub use config::{BalanceScope, Config, Dialect, Layers, Overflow, ScheduleKind, Shadowing};
pub use counts::{CondensedCounts, Counts};
pub use deliveries::{Deliveries, Delivery};
pub use digests::{Digest, DigestFormat, Digests, Gathered};
pub use dispatch::{Outgoing, dispatch};
pub use error::Error;
pub use exchange::ExpertPlan;
pub use experts::{Activation, Expert, Experts, ExpertsShape, Mixed};
pub use gates::{GateChoice, GateKind};
pub use homes::{Homes, RoutingGroup, TokenRun};
pub use lanes::{Lanes, Share};
pub use layer::{Facts, LayerOutput, LayerSizes, MoeLayer};
pub use layer_config::LayerConfig;
pub use plan::{Plan, RowRun};
pub use recording::{MigrationPolicy, Recording, Routings, Script, Site};
pub use router::{Router, Scores};
pub use routing::{CountedRoutes, Peers, Routing, Selector};
pub use schedule::Schedule;
pub use state::GateState;
pub use step_facts::StepFacts;
pub use steps::{Sorting, Step};
pub use transport::{Deciding, ExpertsOnTape, LayerPlan, SentRoutes, Transport, through_experts};
pub use weighting::Weighting;
