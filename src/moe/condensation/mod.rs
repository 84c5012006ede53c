//! Token condensation: similar tokens that are bound for the same expert are sent, and computed, as one row (Luffy,
//! arXiv:2411.15419, 4.4).
//!
//! ```text
//!  routing -> compared routes -> similarities -> clusters -> rewrite of the plan
//!             group and expert   cosines          star, leader
//! ```
//!
//! The paper leaves much open; this is what is done here. Similarity is the plain cosine of the layer's inputs, before
//! any jitter. Clusters are formed among the routes of one expert and of one group of consecutive tokens of the step,
//! whose size the recipe fixes (`moe.condense_tokens`, otherwise a sequence): which rank has the tokens does not matter.
//! Every member of a cluster is within the threshold of its representative. A member receives the representative's
//! result, multiplied by its own gate weight. Condensation happens in training alone.

mod clusters;
mod config;
mod decide;
mod similarity;
mod threshold;

pub use clusters::{ClusterPolicy, ClusterRule, Clusters, may_share, representatives};
pub use config::{Condensation, Condense, CondenseGradient, ROWS_COMPETE};
pub use decide::{Circumstances, Condensed, History};
pub use similarity::{BINS, ComparedRoutes, Pairs, Similarities, condense_groups};
pub use threshold::{LossTrend, Threshold};
