//! The mesh as integers: which rank is where on which axis. Nothing here talks; `Mesh` makes communicators of it, and
//! plans for thousands of ranks need nothing else.
//!
//! ```text
//!  8 ranks, tensor 2, expert 2, experts cut too        the same, experts whole
//!  tensor         {0 1} {2 3} {4 5} {6 7}              {0 1} {2 3} {4 5} {6 7}
//!  data           {0 2 4 6} {1 3 5 7}                  {0 2 4 6} {1 3 5 7}
//!  expert         {0 2} {4 6} {1 3} {5 7}              {0 1} {2 3} {4 5} {6 7}
//!  expert data    {0 4} {2 6} {1 5} {3 7}              {0 2 4 6} {1 3 5 7}
//!  expert tensor  {0 1} {2 3} {4 5} {6 7}              {0} {1} ... {7}
//! ```

use serde::{Deserialize, Serialize};

/// Which of two kinds of groups consists of neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The ranks that share one set of experts: rows travel a short way (DeepSpeed's "E+D").
    #[default]
    ExpertData,
    /// The ranks that hold the same experts: their gradients do (DeepSpeed's "D+E").
    DataExpert,
}

/// A direction of the mesh; each cuts the world into groups of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// All ranks.
    World,
    /// Slices of what is not an expert; the same tokens.
    Tensor,
    /// The same slices; different tokens.
    Data,
    /// One set of experts together, on so many ranks; rows travel here.
    Expert(usize),
    /// Slices of the same experts.
    ExpertTensor,
    /// The same slices of the same experts, of which one set is on so many ranks.
    ExpertData(usize),
    /// Those of the ranks that have one set of experts together that are on one node: rows go on here that came from another.
    /// Not an axis of a shape, which knows no nodes.
    ExpertNode(usize),
}

impl Axis {
    /// The name of its groups where all experts are spread alike; see [`PerLayer::name`](super::PerLayer::name).
    pub fn name(self) -> &'static str {
        match self {
            Axis::World => "world",
            Axis::Tensor => "tensor",
            Axis::Data => "data",
            Axis::Expert(_) => "expert",
            Axis::ExpertTensor => "expert_tensor",
            Axis::ExpertData(_) => "expert_data",
            Axis::ExpertNode(_) => "expert_node",
        }
    }
}

/// Degrees of a mesh: `ranks = tensor x data = expert_tensor x expert x expert_data`. Where layers spread their experts
/// differently, each has a shape of its own, and these differ in `expert` alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MeshShape {
    pub ranks: usize,
    /// Ranks that hold one copy of what is not an expert.
    pub tensor: usize,
    /// Ranks over which one set of experts is spread, times those that slice them.
    pub expert: usize,
    /// Ranks that slice one expert: 1, or as many as `tensor`.
    pub expert_tensor: usize,
    pub order: Order,
}

/// A rank's group on an axis, counted from 0, and its place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub group: usize,
    pub index: usize,
}

/// Why a shape cannot say who is in the groups of [`Axis::ExpertNode`].
const NO_NODES: &str = "a shape knows no nodes";

impl MeshShape {
    /// Experts spread over `expert` ranks, nothing sliced.
    pub fn of(ranks: usize, expert: usize) -> MeshShape {
        MeshShape { ranks, tensor: 1, expert, expert_tensor: 1, order: Order::default() }
    }

    /// Whether the degrees make a mesh.
    pub fn is_possible(&self) -> bool {
        let MeshShape { ranks, tensor, expert, expert_tensor, .. } = *self;
        let degrees_exist = ranks > 0 && tensor > 0 && expert > 0;
        let slices_agree = expert_tensor == 1 || expert_tensor == tensor;
        degrees_exist
            && slices_agree
            && ranks.is_multiple_of(tensor)
            && (ranks / expert_tensor.max(1)).is_multiple_of(expert)
    }

    /// The same with experts spread over so many ranks.
    pub fn at(self, expert: usize) -> MeshShape {
        MeshShape { expert, ..self }
    }

    /// Every axis of a shape.
    pub fn axes(&self) -> [Axis; 6] {
        let expert = self.expert;
        [Axis::World, Axis::Tensor, Axis::Data, Axis::Expert(expert), Axis::ExpertTensor, Axis::ExpertData(expert)]
    }

    /// Ranks of each group on an axis.
    pub fn degree(&self, axis: Axis) -> usize {
        match axis {
            Axis::World => self.ranks,
            Axis::Tensor => self.tensor,
            Axis::Data => self.ranks / self.tensor,
            Axis::Expert(expert) => expert,
            Axis::ExpertTensor => self.expert_tensor,
            Axis::ExpertData(expert) => self.at(expert).expert_data(),
            Axis::ExpertNode(_) => panic!("{NO_NODES}"),
        }
    }

    /// Ranks that hold the same slices of the same experts.
    pub fn expert_data(&self) -> usize {
        self.ranks / (self.expert_tensor * self.expert)
    }

    /// Where a rank is on an axis. With sliced experts each slice has a lane of its own: the ranks that are a multiple
    /// of `expert_tensor` apart.
    pub fn place(&self, axis: Axis, rank: usize) -> Place {
        let neighbours = |size: usize| Place { group: rank / size, index: rank % size };
        let strided = |stride: usize| Place { group: rank % stride, index: rank / stride };
        let lanes = self.expert_tensor;
        let (lane, within, lane_size) = (rank % lanes, rank / lanes, self.ranks / lanes);
        let in_lane = |place: Place, groups: usize| Place { group: lane * groups + place.group, index: place.index };
        let runs = |size: usize| Place { group: within / size, index: within % size };
        let strides = |stride: usize| Place { group: within % stride, index: within / stride };
        match (axis, self.order) {
            (Axis::World, _) => neighbours(self.ranks),
            (Axis::Tensor, _) => neighbours(self.tensor),
            (Axis::Data, _) => strided(self.tensor),
            (Axis::ExpertTensor, _) => neighbours(self.expert_tensor),
            (Axis::Expert(expert), Order::ExpertData) => in_lane(runs(expert), lane_size / expert),
            (Axis::Expert(expert), Order::DataExpert) => in_lane(strides(lane_size / expert), lane_size / expert),
            (Axis::ExpertData(expert), Order::ExpertData) => in_lane(strides(expert), expert),
            (Axis::ExpertData(expert), Order::DataExpert) => in_lane(runs(lane_size / expert), expert),
            (Axis::ExpertNode(_), _) => panic!("{NO_NODES}"),
        }
    }

    /// The ranks of a rank's group on an axis.
    pub fn members(&self, axis: Axis, rank: usize) -> Vec<usize> {
        // Along every axis they are equally far apart.
        let (stride, first) = (self.stride(axis), rank - self.place(axis, rank).index * self.stride(axis));
        (0..self.degree(axis)).map(|i| first + i * stride).collect()
    }

    /// How far apart neighbours of a group are.
    fn stride(&self, axis: Axis) -> usize {
        let (lanes, lane_size) = (self.expert_tensor, self.ranks / self.expert_tensor);
        match (axis, self.order) {
            (Axis::World | Axis::Tensor | Axis::ExpertTensor, _) => 1,
            (Axis::Data, _) => self.tensor,
            (Axis::Expert(_), Order::ExpertData) | (Axis::ExpertData(_), Order::DataExpert) => lanes,
            (Axis::Expert(expert), Order::DataExpert) => lanes * (lane_size / expert),
            (Axis::ExpertData(expert), Order::ExpertData) => lanes * expert,
            (Axis::ExpertNode(_), _) => panic!("{NO_NODES}"),
        }
    }

    /// The ranks of every group on an axis.
    pub fn groups(&self, axis: Axis) -> Vec<Vec<usize>> {
        let degree = self.degree(axis);
        let mut groups = vec![vec![0; degree]; self.ranks / degree];
        for rank in 0..self.ranks {
            let Place { group, index } = self.place(axis, rank);
            groups[group][index] = rank;
        }
        groups
    }

    /// The ranks with this one's place in the tensor groups that can hand sequences to its own: those that every rank of
    /// the tensor group meets in its expert group. Ascending; this rank is among them.
    ///
    /// # Panics
    /// If the shape is impossible.
    pub fn hosts(&self, rank: usize) -> Vec<usize> {
        let lane = rank % self.tensor;
        let first = rank - lane;
        let meets = |other: usize| {
            let group = |rank| self.place(Axis::Expert(self.expert), rank).group;
            (0..self.tensor).all(|lane| group(first + lane) == group(other + lane))
        };
        let members = self.members(Axis::Expert(self.expert), rank);
        members.into_iter().filter(|other| other % self.tensor == lane && meets(other - lane)).collect()
    }

    /// Whether all ranks of a rank's expert group belong to its hosts, so that what these decide alike all of them do.
    ///
    /// # Panics
    /// If the shape is impossible.
    pub fn meets_hosts_only(&self, rank: usize) -> bool {
        let hosts = self.hosts(rank);
        let is_host = |member: usize| hosts.iter().any(|host| host / self.tensor == member / self.tensor);
        self.members(Axis::Expert(self.expert), rank).into_iter().all(is_host)
    }

    /// Whether the expert groups of all ranks of a tensor group bring together the same tokens, so that what each decides
    /// from those is decided alike.
    ///
    /// # Panics
    /// If the shape is impossible.
    pub fn peers_meet_the_same(&self) -> bool {
        let groups = self.groups(Axis::Expert(self.expert));
        let met = |rank: usize| {
            let mut tokens: Vec<usize> = groups[self.place(Axis::Expert(self.expert), rank).group]
                .iter()
                .map(|&r| self.place(Axis::Data, r).index)
                .collect();
            tokens.sort_unstable();
            tokens.dedup();
            tokens
        };
        self.groups(Axis::Tensor).iter().all(|peers| peers.iter().all(|&rank| met(rank) == met(peers[0])))
    }

    /// Possible meshes of as many ranks whose expert degree divides `experts` (0: any), those most like this one first.
    pub fn nearest(&self, experts: usize) -> Vec<MeshShape> {
        let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
        let shapes = divisors(self.ranks).flat_map(|tensor| {
            let slices = if tensor == 1 { vec![1] } else { vec![tensor, 1] };
            slices.into_iter().flat_map(move |expert_tensor| {
                let expert = divisors(self.ranks / expert_tensor).filter(move |expert| experts.is_multiple_of(*expert));
                expert.map(move |expert| MeshShape { tensor, expert, expert_tensor, ..*self })
            })
        });
        let far = |a: usize, b: usize| (a.max(1) as f64 / b.max(1) as f64).ln().abs();
        let distance = |shape: &MeshShape| {
            far(shape.tensor, self.tensor)
                + far(shape.expert, self.expert)
                + far(shape.expert_tensor, self.expert_tensor)
        };
        let mut shapes: Vec<MeshShape> = shapes.collect();
        shapes.sort_by(|a, b| distance(a).total_cmp(&distance(b)));
        shapes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(ranks: usize, [tensor, expert, expert_tensor]: [usize; 3], order: Order) -> MeshShape {
        MeshShape { ranks, tensor, expert, expert_tensor, order }
    }

    /// The golden case of DeepSpeed's documentation of groups: 16 ranks, tensor 2, expert 4.
    #[test]
    fn lanes_of_sliced_experts_are_those_of_deepspeed() {
        let mesh = shape(16, [2, 4, 2], Order::ExpertData);
        let expert = [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]];
        assert_eq!(mesh.groups(Axis::Expert(4)), expert);
        let data = [[0, 8], [2, 10], [4, 12], [6, 14], [1, 9], [3, 11], [5, 13], [7, 15]];
        assert_eq!(mesh.groups(Axis::ExpertData(4)), data);
        assert_eq!(mesh.groups(Axis::Tensor)[3], [6, 7]);
        assert_eq!(mesh.groups(Axis::Data)[1], [1, 3, 5, 7, 9, 11, 13, 15]);
        let mesh = MeshShape { order: Order::DataExpert, ..mesh };
        let expert = [[0, 4, 8, 12], [2, 6, 10, 14], [1, 5, 9, 13], [3, 7, 11, 15]];
        assert_eq!(mesh.groups(Axis::Expert(4)), expert);
        let data = [[0, 2], [4, 6], [8, 10], [12, 14], [1, 3], [5, 7], [9, 11], [13, 15]];
        assert_eq!(mesh.groups(Axis::ExpertData(4)), data);
    }

    /// Sliced experts: each lane by itself. Whole ones: an expert group that holds tensor groups, and one that cuts them.
    #[test]
    fn hosts_are_tensor_groups_that_all_lanes_reach() {
        let hosts = |mesh: MeshShape, rank| mesh.hosts(rank);
        assert_eq!(hosts(shape(8, [2, 2, 2], Order::ExpertData), 3), [1, 3]);
        assert_eq!(hosts(shape(8, [2, 2, 2], Order::DataExpert), 3), [3, 7]);
        assert_eq!(hosts(shape(8, [2, 4, 1], Order::ExpertData), 5), [5, 7]);
        assert_eq!(hosts(shape(8, [2, 2, 1], Order::DataExpert), 5), [1, 5]);
        assert_eq!(hosts(shape(8, [4, 2, 1], Order::ExpertData), 6), [6]);
        // Ranks 0, 1, 2 and 3, 4, 5: rank 1 does not meet rank 3.
        assert_eq!(hosts(shape(6, [2, 3, 1], Order::ExpertData), 0), [0]);
    }

    /// One order of ranks serves every degree: groups of a smaller degree lie within those of a larger one.
    #[test]
    fn degrees_cut_the_same_ranks_differently() {
        let mesh = shape(8, [2, 4, 2], Order::ExpertData);
        assert_eq!(mesh.groups(Axis::Expert(2)), [[0, 2], [4, 6], [1, 3], [5, 7]]);
        assert_eq!(mesh.groups(Axis::ExpertData(2)), [[0, 4], [2, 6], [1, 5], [3, 7]]);
        assert_eq!(mesh.groups(Axis::Expert(4)), [[0, 2, 4, 6], [1, 3, 5, 7]]);
        assert_eq!(mesh.groups(Axis::ExpertData(4)), [[0], [2], [4], [6], [1], [3], [5], [7]]);
        let mesh = MeshShape { order: Order::DataExpert, ..mesh };
        assert_eq!(mesh.groups(Axis::Expert(2)), [[0, 4], [2, 6], [1, 5], [3, 7]]);
        assert_eq!(mesh.groups(Axis::ExpertData(2)), [[0, 2], [4, 6], [1, 3], [5, 7]]);
        let whole = shape(8, [2, 1, 1], Order::ExpertData);
        assert_eq!(whole.groups(Axis::Expert(4)), [[0, 1, 2, 3], [4, 5, 6, 7]]);
        assert_eq!(whole.groups(Axis::ExpertData(2)), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    }

    #[test]
    fn whole_experts_spread_over_all_ranks() {
        let mesh = shape(8, [2, 4, 1], Order::ExpertData);
        assert_eq!(mesh.groups(Axis::Expert(4)), [[0, 1, 2, 3], [4, 5, 6, 7]]);
        assert_eq!(mesh.groups(Axis::ExpertData(4)), [[0, 4], [1, 5], [2, 6], [3, 7]]);
        let mesh = MeshShape { order: Order::DataExpert, ..mesh };
        assert_eq!(mesh.groups(Axis::Expert(4)), [[0, 2, 4, 6], [1, 3, 5, 7]]);
        assert_eq!(mesh.groups(Axis::ExpertData(4)), [[0, 1], [2, 3], [4, 5], [6, 7]]);
    }

    /// Every axis puts every rank into one place, and each rank's expert, expert-tensor and expert-data places tell it
    /// apart from all others.
    #[test]
    fn axes_cover_the_world() {
        for ranks in 1..=24 {
            let any = shape(ranks, [1, 1, 1], Order::ExpertData);
            for mesh in any.nearest(0).into_iter().flat_map(|m| [m, MeshShape { order: Order::DataExpert, ..m }]) {
                assert!(mesh.is_possible(), "{mesh:?}");
                for axis in mesh.axes() {
                    for (rank, group) in (0..ranks).map(|rank| (rank, mesh.place(axis, rank).group)) {
                        assert_eq!(mesh.members(axis, rank), mesh.groups(axis)[group], "{mesh:?} {axis:?}");
                    }
                    let mut all = mesh.groups(axis).concat();
                    all.sort_unstable();
                    assert_eq!(all, (0..ranks).collect::<Vec<_>>(), "{mesh:?} {axis:?}");
                }
                let indices = |axes: &[Axis], rank| axes.iter().map(|&a| mesh.place(a, rank).index).collect::<Vec<_>>();
                let [_, tensor, data, experts @ ..] = mesh.axes();
                for axes in [&experts[..], &[tensor, data][..]] {
                    let mut all: Vec<_> = (0..ranks).map(|rank| indices(axes, rank)).collect();
                    all.sort_unstable();
                    all.dedup();
                    assert_eq!(all.len(), ranks, "{mesh:?} {axes:?}");
                }
            }
        }
    }

    #[test]
    fn peers_of_whole_experts_may_meet_others() {
        for order in [Order::ExpertData, Order::DataExpert] {
            for [ranks, tensor, expert] in [[2, 2, 1], [8, 4, 2], [8, 2, 4], [6, 2, 6]] {
                assert!(shape(ranks, [tensor, expert, 1], order).peers_meet_the_same(), "{ranks} {tensor} {expert}");
            }
            assert!(shape(12, [2, 3, 2], order).peers_meet_the_same(), "slices have lanes of their own");
        }
        // Groups {0 1 2} {3 4 5} part the peers 2 and 3; groups {0 3} {1 4} {2 5} part 0 and 1.
        assert!(!shape(6, [2, 3, 1], Order::ExpertData).peers_meet_the_same());
        assert!(!shape(6, [2, 2, 1], Order::DataExpert).peers_meet_the_same());
    }

    #[test]
    fn the_nearest_meshes_come_first() {
        assert!(!shape(8, [3, 2, 1], Order::ExpertData).is_possible());
        let nearest = shape(8, [3, 2, 3], Order::ExpertData).nearest(4);
        assert_eq!(nearest[0], shape(8, [4, 2, 4], Order::ExpertData));
        assert!(nearest.iter().all(|mesh| 4 % mesh.expert == 0));
    }
}
