//! The mesh: which ranks talk to which, as communicators, and who holds which experts.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::Device;

use super::{ExpertTable, Rates};

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
    /// The rank of an expert group that holds each expert; absent means equal shares.
    owners: Option<Arc<[usize]>>,
    rates: Option<Rates>,
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
        Ok(Mesh { world: world.named("world"), expert: expert_group, expert_data, owners: None, rates: None })
    }

    /// The same with expert e on rank `owners[e]` of every expert group.
    pub fn with_owners(self, owners: &[usize]) -> Mesh {
        Mesh { owners: Some(owners.into()), ..self }
    }

    /// Learns how fast this mesh computes and talks. Collective; takes some ten milliseconds.
    ///
    /// # Errors
    /// What the groups report.
    pub fn measured(self, device: &Arc<Device>) -> Result<Mesh, Error> {
        let rates = Rates::measure(device, &self.expert, &self.world)?;
        Ok(Mesh { rates: Some(rates), ..self })
    }

    /// What [`Mesh::measured`] found, the same on every rank.
    pub fn rates(&self) -> Option<Rates> {
        self.rates
    }

    /// Which rank of an expert group holds which of a layer's `experts`.
    ///
    /// # Panics
    /// If they do not divide, or the given table is of another number: configuration has been checked before.
    pub fn expert_table(&self, experts: usize) -> ExpertTable {
        match &self.owners {
            None => ExpertTable::even(experts, self.expert.size()),
            Some(owners) => {
                assert_eq!(owners.len(), experts, "a table of {} experts", owners.len());
                ExpertTable::new(owners, self.expert.size())
            }
        }
    }
}
