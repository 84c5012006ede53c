//! What a prediction is made of: the model, how it lies on the ranks, and how much one step does.

use guildhall_tensor::Part;

use super::moves::{Group, RowCounts};
use super::transport::Holders;
use crate::memory::Operation;
use crate::model::Sizes;
use crate::moe::{GateKind, Homes, Schedule};
use crate::parallel::{Axis, Bucketing, Degrees, ExpertTable, MeshShape};

/// What of a forward runs again on the way back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recompute {
    Nothing,
    Operations(Vec<Operation>),
    /// Every block from its input; what its collectives gave is kept if `keep`.
    Blocks {
        keep: bool,
    },
}

impl Recompute {
    /// What tapes are told.
    pub fn segments(&self) -> guildhall_tensor::Recompute {
        let part = |operation: &Operation| operation.part();
        let (parts, keep_communication) = match self {
            Recompute::Nothing => (Vec::new(), false),
            Recompute::Operations(operations) => (operations.iter().map(part).collect(), false),
            Recompute::Blocks { keep } => (vec![Part::Block], *keep),
        };
        guildhall_tensor::Recompute::of(parts, keep_communication)
    }
}

/// Where the optimizer's state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// On the device.
    Nowhere,
    /// In the memory of the device's host.
    Host,
    File,
}

/// How a model lies on the ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// Of the layers that spread their experts furthest.
    pub mesh: MeshShape,
    /// Over how many ranks the experts of each layer are spread.
    pub degrees: Degrees,
    /// Tokens are split over tensor groups between sub-layers.
    pub sequence: bool,
    /// What is sharded over the ranks with the same weights: 1 optimizer state, 2 gradients too, 3 weights too.
    pub zero: u8,
    pub recompute: Recompute,
    pub offload: Offload,
    /// Most elements that the optimizer makes f32 copies of at once; absent means a whole weight.
    pub tile: Option<u64>,
    /// Each rank of a tensor group sends its share of the rows alone.
    pub drop_duplicates: bool,
    /// The rank of an expert group that holds each expert; absent means equal shares.
    pub owners: Option<Vec<usize>>,
    pub bucketing: Bucketing,
}

impl Layout {
    /// A mesh, and nothing else.
    pub fn of(mesh: MeshShape, bucketing: Bucketing) -> Layout {
        Layout {
            mesh,
            degrees: Degrees::Same(mesh.expert),
            sequence: false,
            zero: 0,
            recompute: Recompute::Nothing,
            offload: Offload::Nowhere,
            tile: None,
            drop_duplicates: false,
            owners: None,
            bucketing,
        }
    }

    /// Whether each rank of a tensor group sends a share of the rows: where experts are whole, it must.
    pub fn shares_rows(&self) -> bool {
        self.mesh.tensor > 1 && (self.drop_duplicates || self.mesh.expert_tensor == 1)
    }

    /// Who holds which of the experts that are spread over `degree` ranks.
    pub(super) fn expert_table(&self, experts: usize, degree: usize) -> ExpertTable {
        match &self.owners {
            None => ExpertTable::even(experts, degree),
            Some(owners) => ExpertTable::new(owners, degree),
        }
    }
}

/// The most rows over an even share that a rank received in the first steps of the recipes that docs/memory.md lists, on
/// average over layers with experts and in one of them, rounded up.
const EARLY_MEAN: f64 = 2.0;
const EARLY_MOST: f64 = 4.0;

/// A model, its layout, and the rows of one step and of one micro-batch over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    pub sizes: Sizes,
    pub layout: Layout,
    pub rows_per_step: usize,
    pub micro_batch: usize,
    /// Share of the tokens that a masked model predicts; of others, 1.
    pub predicted: f64,
}

impl Task {
    pub fn micro_batches(&self) -> usize {
        self.rows_per_step.div_ceil(self.micro_batch)
    }

    /// The rank with the most to do: of those that hold the most experts the last, which has a row more if any have.
    pub fn fullest(&self) -> usize {
        let Layout { mesh, degrees, .. } = &self.layout;
        let Some(moe) = &self.sizes.moe else { return mesh.ranks - 1 };
        // Where degrees differ, no table makes the ranks of one differ.
        let degree = degrees.largest();
        let table = self.layout.expert_table(moe.experts, degree);
        let experts = |rank: &usize| table.of(mesh.place(Axis::Expert(degree), *rank).index).len();
        (0..mesh.ranks).max_by_key(experts).unwrap_or(0)
    }

    /// Rows that a rank is taken to receive while routers have not learned to spread them: as was measured of early
    /// training, or fewer where there cannot be as many.
    pub fn skew(&self) -> Load {
        let even = Load::Even { imbalance: 1.0 };
        let Some(moe) = &self.sizes.moe else { return even };
        let places = moe.capacity_factor.unwrap_or(f64::INFINITY).max(1.0);
        let most = places.min(self.layout.degrees.largest() as f64);
        if most == 1.0 || matches!(moe.gate, GateKind::Balanced | GateKind::ExpertChoice) {
            return even;
        }
        Load::Skewed { mean: EARLY_MEAN.min(most), most: EARLY_MOST.min(most) }
    }

    pub(super) fn group(&self, axis: Axis, rank: usize) -> Group {
        let mesh = &self.layout.mesh;
        let (size, index) = (mesh.degree(axis) as u64, mesh.place(axis, rank).index as u64);
        Group { axis, size, index }
    }

    /// Tokens of a micro-batch that a rank works on.
    pub fn tokens(&self, rank: usize) -> u64 {
        let rows = self.group(Axis::Data, rank).share(self.micro_batch as u64);
        rows * self.sizes.model.seq as u64
    }

    /// Where the tokens of a micro-batch lie on the ranks of a data group.
    pub(super) fn homes(&self, ranks: u64) -> Homes {
        let rows = self.micro_batch as u64;
        let bound = |rank: u64| rows * rank / ranks * self.sizes.model.seq as u64;
        Homes::new((0..ranks).map(|rank| bound(rank)..bound(rank + 1)))
    }

    /// Over how many ranks the experts of a layer are spread.
    pub(super) fn degree(&self, layer: usize) -> usize {
        self.sizes.expert_degree(layer, &self.layout.degrees)
    }

    /// Sources and destinations of the steps that rows travel in between the ranks of an expert group.
    pub(super) fn schedule(groups: usize, group: Group) -> Schedule {
        Schedule::new(group.index as usize, group.size as usize, groups)
    }
}

/// Where the rows of MoE layers go.
#[derive(Clone, Debug, PartialEq)]
pub enum Load {
    /// Evenly to all ranks of the expert group; this rank receives so many times its share.
    Even { imbalance: f64 },
    /// This rank receives so many times its share in one layer, and on average over all.
    Skewed { mean: f64, most: f64 },
    /// Times its share, by layer.
    ByLayer(Vec<(usize, f64)>),
    /// As counted: rows to and from each rank of the expert group, by layer.
    Counted(Vec<(usize, RowCounts)>),
}

impl Load {
    /// Rows of one layer that travel to and from a rank with `rows` of them, of experts so held.
    ///
    /// # Panics
    /// If counts were given, but not of this layer.
    pub(super) fn rows(&self, layer: usize, rows: u64, (group, holders): (Group, &Holders)) -> RowCounts {
        let imbalance = match self {
            Load::Even { imbalance } => *imbalance,
            Load::Skewed { mean, .. } => *mean,
            Load::ByLayer(layers) => layers.iter().find(|(index, _)| *index == layer).map_or(1.0, |(_, times)| *times),
            Load::Counted(layers) => {
                let counted = layers.iter().find(|(index, _)| *index == layer);
                return counted.unwrap_or_else(|| panic!("no rows were counted of layer {layer}")).1.clone();
            }
        };
        let experts = holders.table.experts() as u64;
        let bound = |expert: u64| (u128::from(rows) * u128::from(expert) / u128::from(experts)) as u64;
        let to = |expert: u64| bound(expert + 1) - bound(expert);
        let travel = |&&expert: &&usize| expert >= holders.visiting;
        let of_rank = |rank| holders.table.of(rank).iter().filter(travel).map(|&expert| to(expert as u64)).sum();
        let send = (0..group.size as usize).map(of_rank).collect();
        let own = holders.reached(group.index as usize) * group.size;
        // No more than all of the group send.
        let received = (rows as f64 * imbalance.min(group.size as f64) * own as f64 / experts as f64).ceil() as u64;
        let receive = (0..group.size).map(|index| Group { index, ..group }.share(received)).collect();
        RowCounts { send, receive }
    }
}
