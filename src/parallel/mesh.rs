//! The mesh: which ranks talk to which, as communicators.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};

/// The groups of one rank. Every rank is data parallel for everything but the experts; consecutive ranks share one
/// set of experts (spec: DeepSpeed's "E+D" order).
#[derive(Clone)]
pub struct Mesh {
    /// All ranks.
    pub world: Arc<dyn Communicator>,
    /// The ranks that hold all experts together: tokens travel here.
    pub expert: Arc<dyn Communicator>,
    /// The ranks that hold the same experts as this one: their gradients are summed here.
    pub expert_data: Arc<dyn Communicator>,
}

impl Mesh {
    /// Splits `world` into groups of `expert` ranks. Collective.
    ///
    /// # Errors
    /// What the splits report.
    ///
    /// # Panics
    /// If `expert` does not divide the world: configuration has been checked before.
    pub fn new(world: Arc<dyn Communicator>, expert: usize) -> Result<Mesh, Error> {
        let rank = world.rank();
        assert!(expert > 0 && world.size().is_multiple_of(expert), "{} ranks in groups of {expert}", world.size());
        let expert_group = world.split(rank / expert, rank)?.named("expert");
        let expert_data = world.split(rank % expert, rank)?.named("expert_data");
        Ok(Mesh { world: world.named("world"), expert: expert_group, expert_data })
    }

    /// The experts, by global number, that this rank holds of `experts`: a consecutive, equal share.
    ///
    /// # Panics
    /// If the group does not divide `experts`.
    pub fn local_experts(&self, experts: usize) -> std::ops::Range<usize> {
        let size = self.expert.size();
        assert!(experts.is_multiple_of(size), "{experts} experts on {size} ranks");
        let share = experts / size;
        self.expert.rank() * share..(self.expert.rank() + 1) * share
    }
}
