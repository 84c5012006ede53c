//! What a prediction is made of: the model, how it lies on the ranks, and how much one step does.

use std::sync::Arc;

use guildhall_comm::wrap::NodeWay;
use guildhall_tensor::Part;

use crate::memory::{Offload, RecomputedOp};
use crate::model::Sizes;
use crate::moe::migration::Migrating;
use crate::moe::{Lanes, Shadowing};
use crate::parallel::collectives::RowCounts;
use crate::parallel::{Axis, Bucketing, Exchange, ExpertTable, MeshShape, Nodes, PerLayer, Rates, share};

/// What of a forward runs again on the way back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecomputePolicy {
    Nothing,
    Operations(Vec<RecomputedOp>),
    /// Every block from its input; what its collectives gave is kept if `keep`.
    Blocks {
        keep: bool,
    },
}

impl RecomputePolicy {
    /// What tapes are told.
    pub fn segments(&self) -> guildhall_tensor::Recompute {
        let part = |operation: &RecomputedOp| operation.part();
        let (parts, keep_communication) = match self {
            RecomputePolicy::Nothing => (Vec::new(), false),
            RecomputePolicy::Operations(operations) => (operations.iter().map(part).collect(), false),
            RecomputePolicy::Blocks { keep } => (vec![Part::Block], *keep),
        };
        guildhall_tensor::Recompute::of(parts, keep_communication)
    }
}

/// How a model lies on the ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// Of the layers that spread their experts furthest.
    pub mesh: MeshShape,
    /// Over how many ranks the experts of each layer are spread.
    pub degrees: PerLayer,
    /// Tokens are split over tensor groups between sub-layers.
    pub sequence: bool,
    /// What is sharded over the ranks with the same weights: 1 optimizer state, 2 gradients too, 3 weights too.
    pub zero: u8,
    pub recompute: RecomputePolicy,
    pub offload: Offload,
    /// Most elements that the optimizer makes f32 copies of at once; absent means a whole weight.
    pub tile: Option<u64>,
    /// Each rank of a tensor group sends its share of the rows alone.
    pub drop_duplicates: bool,
    /// The rank of an expert group that holds each expert; absent means equal shares.
    pub owners: Option<Vec<usize>>,
    /// What travels between the ranks of an expert group.
    pub exchange: Exchange,
    pub nodes: Nodes,
    /// How all-to-alls of expert groups go from node to node.
    pub way: NodeWay,
    pub bucketing: Bucketing,
    /// Share of the routes that are taken to have no row of their own where tokens are condensed.
    pub condensed: f64,
    /// How fast ranks compute and talk: what `shadowing = "auto"` and `migrate = "auto"` go by.
    pub rates: Rates,
    /// Ranks compute on accelerators.
    pub on_accelerators: bool,
    /// What these send each other is added up by their hosts, not in memory of their own.
    pub sums_by_host: bool,
    /// A copy of the state is written while steps are taken.
    pub copies_state: bool,
    /// How sequences migrate, where all ranks are walked ([`Task::traffic_recorded`], [`Task::walked`]).
    pub migrating: Option<Migrating>,
}

/// Of a GPU of 2020 within its node.
const RATES: Rates = Rates { flops: 1e14, bandwidth: 1e11, latency: 1e-5, memory: 1e12 };

impl Layout {
    /// A mesh, and nothing else.
    pub fn of(mesh: MeshShape, bucketing: Bucketing) -> Layout {
        Layout {
            mesh,
            degrees: PerLayer::Same(mesh.expert),
            sequence: false,
            zero: 0,
            recompute: RecomputePolicy::Nothing,
            offload: Offload::None,
            tile: None,
            drop_duplicates: false,
            owners: None,
            exchange: Exchange::default(),
            nodes: Nodes::one(mesh.ranks),
            way: NodeWay::Direct,
            condensed: 0.0,
            bucketing,
            rates: RATES,
            on_accelerators: false,
            sums_by_host: false,
            copies_state: false,
            migrating: None,
        }
    }

    /// Whether all-to-alls of the experts on `degree` ranks go round by nodes.
    pub(super) fn relays(&self, degree: usize) -> bool {
        self.way != NodeWay::Direct && self.nodes.may_gather_experts(&self.mesh.at(degree))
    }

    /// Whether each rank of a tensor group sends a share of the rows: where experts are whole, it must.
    pub fn shares_rows(&self) -> bool {
        self.lanes(0).sharing() > 1
    }

    /// Lane `lane` of a tensor group. Whoever gathers split tokens to share rows sends each once.
    pub(super) fn lanes(&self, lane: usize) -> Lanes {
        Lanes::new(lane, self.mesh.tensor, self.mesh.expert_tensor > 1, self.drop_duplicates || self.sequence)
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

/// Models of so few layers are walked whole, first layers may differ from others, and layers repeat after so many.
const EXACT: usize = 8;
const FIRST: usize = 1;
const PERIOD: usize = 4;

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
        let experts = self.experts_held();
        (0..self.layout.mesh.ranks).max_by_key(experts).unwrap_or(0)
    }

    /// The rank with the least to do: of those that hold the fewest experts the first.
    pub fn emptiest(&self) -> usize {
        let experts = self.experts_held();
        (0..self.layout.mesh.ranks).min_by_key(experts).unwrap_or(0)
    }

    /// Experts that a rank holds of a layer as a table says, of one degree and of as many in every layer. Without one all
    /// ranks hold as many.
    fn experts_held(&self) -> impl Fn(&usize) -> usize {
        let (mesh, degree) = (self.layout.mesh, self.layout.degrees.largest());
        let table = self.layout.owners.as_ref().filter(|_| self.sizes.moe.is_some());
        let table = table.map(|owners| ExpertTable::new(owners, degree));
        move |&rank| table.as_ref().map_or(0, |table| table.of(mesh.place(Axis::Expert(degree), rank).index).len())
    }

    /// What a load may come to. Of a layer that is hotter than others it is not known which: where rows of all layers are
    /// kept most is alive while the last goes back, where they are made again while the first does, beside the gradients of
    /// all others. Nor is it known whether rows come from others, or stay for visitors.
    pub(super) fn cases(&self, load: &Load) -> Vec<Load> {
        let layers: Vec<usize> = self.moe_layers().collect();
        let (Some(&first), Some(&last)) = (layers.first(), layers.last()) else { return vec![load.clone()] };
        let mut ends = vec![first, last];
        ends.dedup();
        let hot: &[Hot] = match self.sizes.moe.as_ref().map(|moe| moe.shadowing()) {
            Some(Shadowing::Force(_)) => &[Hot::Others, Hot::Everyones],
            Some(Shadowing::Auto) => &[Hot::None, Hot::Others, Hot::Everyones],
            _ => &[Hot::None],
        };
        let (mean, most) = match *load {
            Load::Skewed { mean, most } => (mean, most),
            Load::Even { imbalance } if imbalance > 1.0 && hot.len() > 1 => (imbalance, imbalance),
            _ => return vec![load.clone()],
        };
        let others = (mean * layers.len() as f64 - most) / (layers.len().max(2) - 1) as f64;
        let peaked = |layer| move |&hot| Load::Peaked { layer, most, others: others.max(0.0), hot };
        ends.into_iter().flat_map(|layer| hot.iter().map(peaked(layer))).collect()
    }

    /// With as many sequences on each rank as migration may bring to one, and how many times as many these are.
    /// Of a recording it is known what each had.
    pub(super) fn crowded(&self, load: &Load) -> Option<(Task, f64)> {
        let slack = self.layout.migrating.as_ref()?.slack;
        let (mesh, of_mesh) = (&self.layout.mesh, self.place(Axis::Data, 0).1);
        if mesh.hosts(0).len() == 1 || matches!(load, Load::Counted(_) | Load::Table(_)) {
            return None;
        }
        // A host may have so many times the mean of those with which it shares experts.
        let most = |rows: usize| {
            let held = |rank: usize| share(rows, self.place(Axis::Data, rank)).len();
            let of_host = |rank: usize| {
                let hosts = mesh.hosts(rank);
                let all: usize = hosts.iter().map(|&rank| held(rank)).sum();
                all.min(((1.0 + slack) * all as f64 / hosts.len() as f64).ceil() as usize).max(held(rank))
            };
            of_mesh * (0..mesh.ranks).map(of_host).max().unwrap_or(0)
        };
        let (whole, micro_batch) = (self.rows_per_step / self.micro_batch, most(self.micro_batch));
        let rows_per_step = whole * micro_batch + most(self.rows_per_step % self.micro_batch);
        let times = micro_batch as f64 / self.micro_batch as f64;
        Some((Task { rows_per_step, micro_batch, ..self.clone() }, times))
    }

    /// Share of the routes that are taken to have no row of their own, if tokens are condensed.
    pub(super) fn condensed(&self) -> Option<f64> {
        let condensation = self.sizes.moe.as_ref()?.condensation()?;
        condensation.threshold.is_reachable().then_some(self.layout.condensed)
    }

    /// What is left for the others of an expert group where one rank has a load.
    pub fn rest(&self, load: &Load) -> Load {
        let ranks = self.layout.degrees.largest() as f64;
        let times = match load {
            Load::Even { imbalance } => *imbalance,
            Load::Skewed { mean, .. } => *mean,
            Load::Zipf { .. } | Load::Peaked { .. } | Load::Counted(_) | Load::Table(_) => 1.0,
        };
        Load::Even { imbalance: if ranks > 1.0 { (ranks - times).max(0.0) / (ranks - 1.0) } else { 1.0 } }
    }

    /// Rows that a rank is taken to receive while routers have not learned to spread them: as was measured of early
    /// training, or fewer where there cannot be as many: where experts travel, its own alone.
    pub fn skew(&self) -> Load {
        let even = Load::Even { imbalance: 1.0 };
        let Some(moe) = self.sizes.moe.as_ref().filter(|_| self.layout.exchange == Exchange::Tokens) else {
            return even;
        };
        let places = moe.capacity_factor.unwrap_or(f64::INFINITY).max(1.0);
        let most = places.min(self.layout.degrees.largest() as f64);
        if most == 1.0 || moe.widest().selector().gate.is_even() {
            return even;
        }
        Load::Skewed { mean: EARLY_MEAN.min(most), most: EARLY_MOST.min(most) }
    }

    /// A rank's place among those along an axis, and how many they are.
    pub(super) fn place(&self, axis: Axis, rank: usize) -> (usize, usize) {
        let mesh = &self.layout.mesh;
        (mesh.place(axis, rank).index, mesh.degree(axis))
    }

    /// Over how many ranks the experts of a layer are spread.
    pub(super) fn degree(&self, layer: usize) -> usize {
        self.sizes.expert_degree(layer, &self.layout.degrees)
    }

    /// How many experts a layer has.
    ///
    /// # Panics
    /// If it has none.
    pub(super) fn experts(&self, layer: usize) -> usize {
        self.sizes.moe_of(layer).expect("a layer with experts").experts
    }

    /// How many layers a shorter model has that ends like this one, and how many repeat in both; nothing where they do not,
    /// or are too few to gain by it.
    pub(super) fn shortened(&self) -> Option<(usize, usize)> {
        let layers = self.sizes.model.layers;
        let is_moe = |layer: usize| self.sizes.moe_of(layer).is_some();
        let repeats = |period: &usize| (FIRST..layers - period).all(|layer| is_moe(layer) == is_moe(layer + period));
        let lists = [Some(&self.layout.degrees), self.sizes.moe.as_ref().map(|moe| &moe.experts)];
        let differ = lists.into_iter().flatten().any(|numbers| numbers.list().is_some());
        // Layers of two stacks do not repeat each other.
        if layers <= EXACT || differ || self.sizes.blueprint().reads_a_source() {
            return None;
        }
        let period = (1..=PERIOD).find(repeats)?;
        let least = FIRST + 2 * period;
        Some((least + (layers - least) % period, period))
    }

    /// Layers with experts.
    pub(super) fn moe_layers(&self) -> impl Iterator<Item = usize> {
        self.sizes.moe_layers().map(|(layer, _)| layer)
    }
}

/// Which experts a load makes hot enough to visit where that is decided by counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hot {
    None,
    /// Those of other ranks, by the rows of other ranks.
    Others,
    /// Those of other ranks, which get all rows of this one too: they stay here.
    Everyones,
}

/// Where the rows of MoE layers go.
#[derive(Clone, Debug, PartialEq)]
pub enum Load {
    /// Evenly to all ranks of the expert group; this rank computes so many times its share.
    Even { imbalance: f64 },
    /// This rank computes so many times its share in one layer, and on average over all.
    Skewed { mean: f64, most: f64 },
    /// As Zipf's law with this exponent has it, the hottest experts on this rank; the same on every rank and in every layer.
    Zipf { exponent: f64 },
    /// So many times its share in one layer, and in each of the others.
    Peaked { layer: usize, most: f64, others: f64, hot: Hot },
    /// As counted: rows to and from each rank of the expert group, by layer.
    Counted(Vec<(usize, RowCounts)>),
    /// As counted in a micro-batch, of which all of the step are taken to be: by layer, what each rank of the world has.
    Table(Arc<LayerTable>),
}

impl Load {
    /// As many rows on this rank where a share is so many times as large.
    pub(super) fn of_larger_shares(&self, times: f64) -> Load {
        match *self {
            Load::Even { imbalance } => Load::Even { imbalance: imbalance / times },
            Load::Skewed { mean, most } => Load::Skewed { mean: mean / times, most: most / times },
            Load::Peaked { layer, most, others, hot } => {
                Load::Peaked { layer, most: most / times, others: others / times, hot }
            }
            Load::Zipf { .. } | Load::Counted(_) | Load::Table(_) => self.clone(),
        }
    }
}

/// What was counted in a micro-batch, by layer and rank of the world.
pub type LayerTable = Vec<(usize, Vec<RankRows>)>;

/// What was counted of one layer on one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankRows {
    /// By expert, the rows that the rank sends.
    pub sent: Vec<usize>,
    /// Of its tensor group, if routes share rows there.
    pub condensed: Option<CondensedRows>,
    /// How many routes each set has that is compared.
    pub compared: Vec<usize>,
}

/// By expert, the routes of a tensor group, and the rows that are left of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CondensedRows {
    pub routes: Vec<usize>,
    pub left: Vec<usize>,
}
