//! The mesh: which ranks talk to which, as communicators, and who holds which experts.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::Device;

use super::{Axis, ExpertTable, MeshShape, Placement, Rates, Slice, Spread, Stream, Zero, share};

/// The groups of one rank; see [`MeshShape`] for who is in them.
#[derive(Clone)]
pub struct Mesh {
    /// All ranks.
    pub world: Arc<dyn Communicator>,
    /// The ranks that hold slices of one model and see the same tokens.
    pub tensor: Arc<dyn Communicator>,
    /// The ranks that hold the same slices and see different tokens: batches are dealt here.
    pub data: Arc<dyn Communicator>,
    /// The ranks that hold all experts together: rows travel here.
    pub expert: Arc<dyn Communicator>,
    /// The ranks that hold slices of the same experts.
    pub expert_tensor: Arc<dyn Communicator>,
    /// The ranks that hold the same slices of the same experts: their gradients are summed here.
    pub expert_data: Arc<dyn Communicator>,
    shape: MeshShape,
    /// Whether tokens are split over tensor groups between sub-layers.
    sequence: bool,
    /// The rank of an expert group that holds each expert; absent means equal shares.
    owners: Option<Arc<[usize]>>,
    rates: Option<Rates>,
    zero: Zero,
}

impl Mesh {
    /// Splits `world` into groups of `expert` ranks, nothing sliced. Collective.
    ///
    /// # Errors
    /// What the splits report.
    ///
    /// # Panics
    /// If `expert` does not divide the world: configuration has been checked before.
    pub fn new(world: Arc<dyn Communicator>, expert: usize) -> Result<Mesh, Error> {
        let ranks = world.size();
        Mesh::of(world, MeshShape::of(ranks, expert))
    }

    /// Splits `world` into the groups of a shape. Collective.
    ///
    /// # Errors
    /// What the splits report.
    ///
    /// # Panics
    /// If the shape is impossible or of another number of ranks: configuration has been checked before.
    pub fn of(world: Arc<dyn Communicator>, shape: MeshShape) -> Result<Mesh, Error> {
        assert!(shape.is_possible() && shape.ranks == world.size(), "{shape:?} of {} ranks", world.size());
        let group = |axis: Axis| {
            let place = shape.place(axis, world.rank());
            Ok::<_, Error>(world.split(place.group, place.index)?.named(axis.name()))
        };
        let [tensor, data] = [group(Axis::Tensor)?, group(Axis::Data)?];
        let [expert, expert_tensor] = [group(Axis::Expert)?, group(Axis::ExpertTensor)?];
        let expert_data = group(Axis::ExpertData)?;
        let world = world.named(Axis::World.name());
        Ok(Mesh {
            world,
            tensor,
            data,
            expert,
            expert_tensor,
            expert_data,
            shape,
            sequence: false,
            owners: None,
            rates: None,
            zero: Zero::Off,
        })
    }

    pub fn shape(&self) -> MeshShape {
        self.shape
    }

    /// The place in its expert group of a rank of this one's tensor group.
    pub fn expert_rank_of_peer(&self, tensor_rank: usize) -> usize {
        self.shape.place(Axis::Expert, self.world.rank() - self.tensor.rank() + tensor_rank).index
    }

    /// This rank's group on an axis.
    pub fn group(&self, axis: Axis) -> &Arc<dyn Communicator> {
        match axis {
            Axis::World => &self.world,
            Axis::Tensor => &self.tensor,
            Axis::Data => &self.data,
            Axis::Expert => &self.expert,
            Axis::ExpertTensor => &self.expert_tensor,
            Axis::ExpertData => &self.expert_data,
        }
    }

    /// The ranks over which the gradient of such a weight is summed. All of them hold the same copy.
    pub fn holders(&self, placement: &Placement) -> &Arc<dyn Communicator> {
        self.group(placement.holders())
    }

    /// How many ranks of the world hold the same copy of such a weight.
    pub fn copies(&self, placement: &Placement) -> usize {
        match placement.spread {
            Spread::Replicated => self.world.size(),
            Spread::Tensor => self.data.size(),
            Spread::Expert => self.expert_data.size() * self.expert_tensor.size(),
            Spread::ExpertTensor => self.expert_data.size(),
        }
    }

    /// Whether this rank's holders of such a weight answer for it: of several groups with the same copy, the first.
    pub fn answers(&self, placement: &Placement) -> bool {
        match placement.spread {
            Spread::Replicated => placement.partial || self.tensor.rank() == 0,
            Spread::Expert => self.expert_tensor.rank() == 0,
            Spread::Tensor | Spread::ExpertTensor => true,
        }
    }

    /// The same with tokens split over tensor groups between sub-layers, or not.
    pub fn with_sequence(self, sequence: bool) -> Mesh {
        Mesh { sequence, ..self }
    }

    /// Whether the residual stream is split by tokens.
    pub fn is_sequence_parallel(&self) -> bool {
        self.sequence
    }

    /// How this many tokens of a micro-batch lie on the tensor group.
    pub fn stream(&self, tokens: usize) -> Stream {
        match self.sequence {
            true => Stream::split(tokens, &self.tensor),
            false => Stream::whole(tokens, &self.tensor),
        }
    }

    /// This rank's slice of a dim of `size`, of what is cut over tensor groups.
    pub fn slice(&self, dim: usize, size: usize) -> Slice {
        Slice::share(dim, size, (self.tensor.rank(), self.tensor.size()))
    }

    /// The elements of a local weight of `len` that this rank answers for among its holders: it measures them, writes
    /// them into checkpoints, and with ZeRO is the one to keep what belongs to them.
    pub fn share(&self, placement: &Placement, len: usize) -> Range<usize> {
        let holders = self.holders(placement);
        share(len, (holders.rank(), holders.size()))
    }

    /// The same with a part of every weight's companions on each of its holders.
    pub fn with_zero(self, zero: Zero) -> Mesh {
        Mesh { zero, ..self }
    }

    pub fn zero(&self) -> Zero {
        self.zero
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
