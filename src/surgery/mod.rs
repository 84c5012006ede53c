//! Surgery: checkpoints become another model.
//!
//! ```text
//!  dense checkpoint -> Model --- moefy -----+
//!                                           |
//!  checkpoints -> Models -- aggregate ------+-> graft: every tensor -> Model -> checkpoint
//!                                           |   copied, a mean, rows
//!  checkpoint -> Model ------ prune --------+   of others, or new
//! ```

mod aggregate;
mod aggregation;
mod checkpoint;
mod error;
mod graft;
mod moefied;
mod moefy;
mod prune;
mod pruning;
mod scores;

pub use aggregate::{GateFactors, aggregate};
pub use aggregation::Aggregation;
pub use checkpoint::SourceModel;
pub use error::Error;
pub use moefied::Moefy;
pub use moefy::moefy;
pub use prune::prune;
pub use pruning::{ExpertsToKeep, Pruning};
pub use scores::{drawn, gate_norms, largest, largest_of_all, multiples_of_means, shares_of_layers};
