//! The mesh: which ranks talk to which, as communicators, and who holds which experts.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use guildhall_comm::wrap::NodeWay;
use guildhall_comm::{Communicator, Error};
use guildhall_tensor::{Device, Dtype};

use super::{
    Axis, Exchange, ExpertTable, Hosts, MeasuredWays, MeshShape, Nodes, PerLayer, Placement, Rates, Rows, Slice,
    Spread, Stream, Zero, share,
};

/// The groups of one rank; see [`MeshShape`] for who is in them. Where layers spread their experts differently, the groups
/// of experts are those of one degree, and [`Mesh::at`] gives the same mesh with those of another.
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
    exchange: Exchange,
    rates: Option<Rates>,
    nodes: Nodes,
    /// How all-to-alls of the expert group go from node to node.
    way: NodeWay,
    measured_ways: Vec<MeasuredWays>,
    zero: Zero,
    degrees: PerLayer,
    /// Groups of the degrees that are not this mesh's.
    others: Vec<ExpertGroups>,
}

/// The groups of experts that are spread over `degree` ranks.
#[derive(Clone)]
struct ExpertGroups {
    degree: usize,
    expert: Arc<dyn Communicator>,
    expert_data: Arc<dyn Communicator>,
    rates: Option<Rates>,
    way: NodeWay,
}

impl Mesh {
    /// Splits `world` into groups of `expert` ranks, nothing sliced. Collective.
    ///
    /// # Errors
    /// What the groups report.
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
    /// What the groups report.
    ///
    /// # Panics
    /// If the shape is impossible or of another number of ranks: configuration has been checked before.
    pub fn of(world: Arc<dyn Communicator>, shape: MeshShape) -> Result<Mesh, Error> {
        Mesh::of_degrees(world, shape, PerLayer::Same(shape.expert))
    }

    /// Splits `world` into the groups of a shape, with those of experts once for each of `degrees`, whatever the shape's
    /// own. The mesh has those of the largest. Collective.
    ///
    /// # Errors
    /// What the groups report.
    ///
    /// # Panics
    /// If a shape is impossible or of another number of ranks: configuration has been checked before.
    pub fn of_degrees(world: Arc<dyn Communicator>, shape: MeshShape, degrees: PerLayer) -> Result<Mesh, Error> {
        let group =
            |axis: Axis| Ok::<_, Error>(world.group(&shape.members(axis, world.rank()))?.named(&degrees.name(axis)));
        let experts = |degree: usize| {
            let shape = shape.at(degree);
            assert!(shape.is_possible() && shape.ranks == world.size(), "{shape:?} of {} ranks", world.size());
            let [expert, expert_data] = [group(Axis::Expert(degree))?, group(Axis::ExpertData(degree))?];
            Ok::<_, Error>(ExpertGroups { degree, expert, expert_data, rates: None, way: NodeWay::Direct })
        };
        let mut others = degrees.distinct().into_iter().map(experts).collect::<Result<Vec<_>, _>>()?;
        let ExpertGroups { degree, expert, expert_data, rates, way } = others.pop().expect("a layer has a degree");
        let [tensor, data, expert_tensor] = [group(Axis::Tensor)?, group(Axis::Data)?, group(Axis::ExpertTensor)?];
        let world = world.named(Axis::World.name());
        Ok(Mesh {
            world,
            tensor,
            data,
            expert,
            expert_tensor,
            expert_data,
            shape: shape.at(degree),
            sequence: false,
            owners: None,
            exchange: Exchange::default(),
            rates,
            nodes: Nodes::one(shape.ranks),
            way,
            measured_ways: Vec::new(),
            zero: Zero::Off,
            degrees,
            others,
        })
    }

    pub fn shape(&self) -> MeshShape {
        self.shape
    }

    /// Over how many ranks the experts of each layer are spread.
    pub fn degrees(&self) -> &PerLayer {
        &self.degrees
    }

    /// The same with the groups of experts that are spread over `degree` ranks.
    ///
    /// # Panics
    /// If no layer's are.
    pub fn at(&self, degree: usize) -> Mesh {
        let Some(other) = self.other(degree) else { return self.clone() };
        let mut mesh = self.clone();
        mesh.others.retain(|other| other.degree != degree);
        mesh.others.push(self.own_experts());
        (mesh.expert, mesh.expert_data) = (other.expert.clone(), other.expert_data.clone());
        (mesh.rates, mesh.way) = (other.rates, other.way);
        mesh.shape.expert = degree;
        mesh
    }

    fn own_experts(&self) -> ExpertGroups {
        let (expert, expert_data) = (self.expert.clone(), self.expert_data.clone());
        ExpertGroups { degree: self.shape.expert, expert, expert_data, rates: self.rates, way: self.way }
    }

    /// The place in its expert group of a rank of this one's tensor group.
    pub fn expert_rank_of_peer(&self, tensor_rank: usize) -> usize {
        self.shape.place(Axis::Expert(self.shape.expert), self.world.rank() - self.tensor.rank() + tensor_rank).index
    }

    /// The tensor groups to which a sequence of this rank's can go from a layer whose experts are spread as this mesh says.
    pub fn hosts(&self) -> Hosts {
        let own = self.world.rank();
        let world = self.shape.hosts(own);
        let place = |axis: Axis| world.iter().map(move |&rank| self.shape.place(axis, rank).index).collect();
        Hosts {
            group: self.expert.clone(),
            ranks: place(Axis::Expert(self.shape.expert)),
            own: world.iter().position(|&rank| rank == own).expect("a rank meets itself"),
            origins: place(Axis::Data),
        }
    }

    /// For each lane of a tensor group and each of [`Mesh::hosts`], the rank of the lane's expert group that is that lane
    /// of the host.
    pub fn host_ranks(&self) -> Vec<Vec<usize>> {
        let own = self.world.rank();
        let (hosts, lane) = (self.shape.hosts(own), self.tensor.rank());
        let place = |rank: usize| self.shape.place(Axis::Expert(self.shape.expert), rank).index;
        (0..self.tensor.size()).map(|of| hosts.iter().map(|rank| place(rank - lane + of)).collect()).collect()
    }

    /// All tensor groups.
    pub fn all_hosts(&self) -> Hosts {
        let ranks: Vec<usize> = (0..self.data.size()).collect();
        Hosts { group: self.data.clone(), origins: ranks.clone(), ranks, own: self.data.rank() }
    }

    /// This rank's group on an axis.
    ///
    /// # Panics
    /// If it is one of experts that are spread as no layer's are, or of their nodes.
    pub fn group(&self, axis: Axis) -> &Arc<dyn Communicator> {
        match axis {
            Axis::World => &self.world,
            Axis::Tensor => &self.tensor,
            Axis::Data => &self.data,
            Axis::Expert(degree) => self.other(degree).map_or(&self.expert, |other| &other.expert),
            Axis::ExpertTensor => &self.expert_tensor,
            Axis::ExpertData(degree) => self.other(degree).map_or(&self.expert_data, |other| &other.expert_data),
            Axis::ExpertNode(_) => panic!("what is on one node only an all-to-all goes by"),
        }
    }

    /// The groups of another degree than this mesh's.
    fn other(&self, degree: usize) -> Option<&ExpertGroups> {
        let other = self.others.iter().find(|other| other.degree == degree);
        assert!(other.is_some() || degree == self.shape.expert, "no experts on {degree} ranks: {}", self.degrees);
        other
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
            Spread::Expert(_) => self.holders(placement).size() * self.expert_tensor.size(),
            Spread::ExpertTensor(_) => self.holders(placement).size(),
        }
    }

    /// Whether this rank's holders of such a weight answer for it: of several groups with the same copy, the first.
    pub fn answers(&self, placement: &Placement) -> bool {
        match placement.spread {
            Spread::Replicated => placement.partial || self.tensor.rank() == 0,
            Spread::Expert(_) => self.expert_tensor.rank() == 0,
            Spread::Tensor | Spread::ExpertTensor(_) => true,
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

    /// How these tokens of a micro-batch lie on the tensor group.
    pub fn stream(&self, rows: impl Into<Rc<Rows>>) -> Stream {
        match self.sequence {
            true => Stream::split(rows, &self.tensor),
            false => Stream::whole(rows, &self.tensor),
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

    /// The same with rows or weights of experts between the ranks of expert groups.
    pub fn with_exchange(self, exchange: Exchange) -> Mesh {
        Mesh { exchange, ..self }
    }

    pub fn exchange(&self) -> Exchange {
        self.exchange
    }

    /// The same with ranks on these nodes.
    pub fn on_nodes(self, nodes: Nodes) -> Mesh {
        Mesh { nodes, ..self }
    }

    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// How all-to-alls of this degree's expert groups go from node to node.
    pub fn way(&self) -> NodeWay {
        self.way
    }

    /// How all-to-alls of each expert group go from node to node, where ways differ: by the name of the group.
    pub fn ways(&self) -> Vec<(String, NodeWay)> {
        let meshes = self.degrees.distinct().into_iter().map(|degree| (degree, self.at(degree)));
        let differ = meshes.filter(|(_, mesh)| mesh.has_ways());
        differ.map(|(degree, mesh)| (self.degrees.name(Axis::Expert(degree)), mesh.way)).collect()
    }

    /// What [`Mesh::with_fastest_ways`] has measured, the same on every rank.
    pub fn measured_ways(&self) -> &[MeasuredWays] {
        &self.measured_ways
    }

    pub(super) fn note_way(&mut self, measured: MeasuredWays) {
        self.measured_ways.push(measured);
    }

    /// The expert group of this degree with all-to-alls that go `way` from node to node, if its ranks are so that messages
    /// are saved by it. Collective over the group.
    ///
    /// # Errors
    /// What the group reports.
    pub(super) fn expert_by(&self, way: NodeWay) -> Result<Arc<dyn Communicator>, Error> {
        let degree = self.shape.expert;
        let members = self.shape.members(Axis::Expert(degree), self.world.rank());
        let way = if self.nodes.may_gather(&members) { way } else { NodeWay::Direct };
        self.expert.by_nodes(&self.nodes.among(&members), way, &self.degrees.name(Axis::ExpertNode(degree)))
    }

    /// Whether ways from node to node differ for any expert group of this degree.
    pub(super) fn has_ways(&self) -> bool {
        self.nodes.may_gather_experts(&self.shape)
    }

    /// The same with what `f` makes of each degree's mesh.
    pub(super) fn for_each_degree(self, mut f: impl FnMut(Mesh) -> Result<Mesh, Error>) -> Result<Mesh, Error> {
        let own = self.shape.expert;
        let degrees = self.degrees.distinct();
        Ok(degrees.into_iter().try_fold(self, |mesh, degree| f(mesh.at(degree)))?.at(own))
    }

    /// The same with all-to-alls of expert groups that go `way` from node to node, where that differs. Collective.
    ///
    /// # Errors
    /// What the groups report.
    pub fn with_way(self, way: NodeWay) -> Result<Mesh, Error> {
        self.for_each_degree(|mesh| mesh.of_way(way))
    }

    /// [`Mesh::with_way`] of this degree alone. Collective.
    ///
    /// # Errors
    /// What the groups report.
    pub(super) fn of_way(self, way: NodeWay) -> Result<Mesh, Error> {
        let way = if self.has_ways() { way } else { NodeWay::Direct };
        let expert = self.expert_by(way)?;
        Ok(Mesh { expert, way, ..self })
    }

    /// The same, taken to compute and talk so fast at every degree; all ranks must say the same.
    pub fn with_rates(mut self, rates: Rates) -> Mesh {
        self.others.iter_mut().for_each(|other| other.rates = Some(rates));
        Mesh { rates: Some(rates), ..self }
    }

    /// Learns how fast this mesh multiplies with weights of `dtype` and talks, for each degree of experts by itself, since
    /// other groups use other links. Collective; takes some ten milliseconds each, on a GPU some hundred.
    ///
    /// # Errors
    /// What the groups report.
    pub fn measured(self, device: &Arc<Device>, dtype: Dtype) -> Result<Mesh, Error> {
        self.for_each_degree(|mesh| {
            let rates = Rates::measure((device, dtype), &mesh.expert, &mesh.world)?;
            Ok(Mesh { rates: Some(rates), ..mesh })
        })
    }

    /// What [`Mesh::measured`] found of this degree, the same on every rank.
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
