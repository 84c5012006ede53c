//! Training: the loop over steps, one step, evaluation, and what a run leaves behind.

mod error;
mod evaluate;
mod folder_lock;
mod job;
mod locate;
mod overdue;
mod pairs;
mod replacing;
mod replicas;
mod routings;
mod row_losses;
mod run;
mod saving;
mod screen;
mod setup;
mod shares;
mod step;
mod tasks;
mod totals;
mod utilization;

pub use error::{Error, StopKind};
pub use evaluate::{HeldOutLosses, HeldOutPart, held_out_loss, held_out_losses};
pub use job::{InitError, Job, JobError, Start, init_weights};
pub use pairs::PairSums;
pub use replacing::Replacing;
pub use replicas::{Divergence, divergence};
pub use routings::{followed, migrating, migration_policy, recorded_shape, routings, visiting};
pub use row_losses::RowSums;
pub use run::{Begun, Data, Outcome, train};
pub use setup::{begin, loader, mesh, rank_memory, sizes, trained, trainer, trainer_on};
pub use step::{StepReport, StepSums, Trainer};
pub use utilization::held_out_loads;
