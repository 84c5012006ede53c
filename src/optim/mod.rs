//! The optimizer: an update rule on one weight's state, the learning rate's shape, clipping, and the step over all.

mod schedule;
mod state;

pub use schedule::{Decay, LearningRate};
pub use state::{Hyper, Optimizer, Slot};
