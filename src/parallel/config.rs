//! The `[parallel]` section of a recipe: how many ranks, how experts are spread over them, and how gradients
//! travel.

use serde::{Deserialize, Serialize};

use super::{MeshShape, Order};

/// The mesh, and how long ranks wait for each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Ranks (threads) of the run.
    #[serde(default = "one")]
    pub ranks: usize,
    /// Ranks one set of experts is spread over, in all layers or in each; divides `ranks` and `moe.experts`.
    #[serde(default)]
    pub expert: PerLayer,
    /// Ranks that slices of what is not an expert are spread over; divides `ranks`.
    #[serde(default = "one")]
    pub tensor: usize,
    /// Ranks that slices of an expert are spread over: 1, or as many as `tensor`, which absent means.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_tensor: Option<usize>,
    /// Whether the tokens between sub-layers are split over the ranks that `tensor` slices.
    #[serde(default)]
    pub sequence: bool,
    /// ZeRO's stage: of what each rank that holds a weight keeps its own share alone. 1: the optimizer's state, 2: and
    /// gradients, 3: and weights.
    #[serde(default)]
    pub zero: usize,
    /// Whether the ranks that share experts are neighbours, or those that hold the same ones.
    #[serde(default)]
    pub order: Order,
    /// The rank of an expert group that holds each expert; absent means equal, consecutive shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_table: Option<Vec<usize>>,
    /// Steps between looks at who should hold which expert, after which experts may change ranks; 0 is never.
    #[serde(default)]
    pub replace_every: u64,
    /// By what part of it the rows of the rank that has most must fall for experts to change ranks.
    #[serde(default = "default_replace_gain")]
    pub replace_gain: f64,
    /// What travels between the ranks of an expert group.
    #[serde(default)]
    pub exchange: Exchange,
    /// How what the ranks of an expert group send each other goes from node to node.
    #[serde(default)]
    pub all_to_all: AllToAll,
    /// What computes.
    #[serde(default)]
    pub backend: Backend,
    /// How what is in GPUs' memory goes from rank to rank.
    #[serde(default)]
    pub transport: GpuTransport,
    /// Compute threads per rank; absent means cores divided by ranks.
    #[serde(default)]
    pub threads: Option<usize>,
    /// Whether threads of ranks that wait for each other in one process do parts of each other's work.
    #[serde(default = "default_standby")]
    pub standby: bool,
    /// Whether sequences move to other tensor groups behind MoE layers.
    #[serde(default)]
    pub migrate: Migrate,
    /// Tensor groups with the least traffic of a sequence, of which it goes to the one with which a step takes least time;
    /// absent means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migrate_candidates: Option<usize>,
    /// By how much more than the mean a tensor group may get of sequences that move.
    #[serde(default = "default_migrate_slack")]
    pub migrate_slack: f64,
    /// Seconds a rank waits in a collective before it reports who is missing.
    #[serde(default = "default_timeout_s")]
    pub timeout_s: u64,
    /// Most bytes of small gradients that are summed over ranks by one collective.
    #[serde(default = "default_bucket_bytes")]
    pub bucket_bytes: usize,
    /// Whether gradients travel while backward goes on.
    #[serde(default = "default_overlap")]
    pub overlap: bool,
    /// Makes messages between ranks take time; absent means they take what they take.
    #[serde(default)]
    pub link: Option<LinkCost>,
    /// The same for messages that leave a node.
    #[serde(default)]
    pub node_link: Option<NodeLink>,
}

/// What a rank computes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// This machine's processor.
    #[default]
    Cpu,
    /// Accelerators' kernels, compiled for this processor; each is held against the CPU's.
    Simulated,
    /// NVIDIA GPUs.
    Cuda,
}

impl Backend {
    pub const ALL: [Backend; 3] = [Backend::Cpu, Backend::Simulated, Backend::Cuda];

    /// As recipes have it.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Cpu => "cpu",
            Backend::Simulated => "simulated",
            Backend::Cuda => "cuda",
        }
    }
}

/// What carries GPUs' memory between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuTransport {
    /// NCCL, where it is there and each rank has a GPU of its own. Else threads' GPUs copy from each other, and what processes
    /// send each other goes by way of the host.
    #[default]
    Auto,
    /// NCCL, which takes a GPU for each rank.
    Nccl,
    /// GPUs copy from each other: those of ranks that are threads.
    Copies,
    /// Copies to the host, from there as the CPU's, and back.
    Host,
}

/// What travels between the ranks that share one set of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exchange {
    /// Rows go to the ranks that hold their experts, and their results home.
    #[default]
    Tokens,
    /// The weights of all experts go to every rank, and their gradients home (Janus).
    Experts,
}

/// How rows go from node to node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AllToAll {
    /// The fastest of the others, as they are measured.
    Auto,
    /// From every rank to every other.
    #[default]
    Direct,
    /// Collected by one rank for each pair of nodes, and handed out by another (HetuMoE).
    TwoLevel,
    /// From every rank to one of each other node, which hands them out (Tutel, DeepEP).
    TwoD,
}

/// Whether sequences go on at the ranks that compute most of their results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Migrate {
    #[default]
    Off,
    /// Those for which less travels then.
    Auto,
    /// At least a quarter of all, behind every MoE layer.
    Force,
}

/// What an operation costs between ranks of one node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkCost {
    /// Of each operation.
    pub latency_us: f64,
    /// Of each message of it, one for each rank that is sent something.
    #[serde(default)]
    pub message_us: f64,
    /// Gigabytes (10^9) a second, each way.
    pub gbytes_per_s: f64,
}

/// What an operation costs between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeLink {
    /// Consecutive ranks of one node.
    pub ranks_per_node: usize,
    /// Of each operation.
    pub latency_us: f64,
    /// Of each message of it.
    #[serde(default)]
    pub message_us: f64,
    /// Gigabytes (10^9) a second, each way.
    pub gbytes_per_s: f64,
}

/// A number that all layers with experts have, or each its own: how many experts it has, over how many ranks they are
/// spread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum PerLayer {
    /// Of all layers with experts.
    Same(usize),
    /// Of each layer with experts, in their order.
    Each(Vec<usize>),
}

/// How gradients are gathered into messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucketing {
    /// Most bytes of small gradients in one message.
    pub bytes: usize,
    /// Whether messages leave while backward goes on.
    pub overlap: bool,
}

impl Config {
    /// A mesh, and defaults for all else.
    pub fn of(ranks: usize, expert: usize) -> Config {
        Config {
            ranks,
            expert: PerLayer::Same(expert),
            tensor: 1,
            expert_tensor: None,
            sequence: false,
            zero: 0,
            order: Order::default(),
            expert_table: None,
            replace_every: 0,
            replace_gain: default_replace_gain(),
            exchange: Exchange::default(),
            all_to_all: AllToAll::default(),
            backend: Backend::default(),
            transport: GpuTransport::default(),
            threads: None,
            standby: default_standby(),
            migrate: Migrate::Off,
            migrate_candidates: None,
            migrate_slack: default_migrate_slack(),
            timeout_s: default_timeout_s(),
            bucket_bytes: default_bucket_bytes(),
            overlap: default_overlap(),
            link: None,
            node_link: None,
        }
    }

    /// The mesh it describes, possible or not: that of the layers that spread their experts furthest.
    pub fn shape(&self) -> MeshShape {
        let (expert, expert_tensor) = (self.expert.largest(), self.expert_tensor.unwrap_or(self.tensor));
        MeshShape { ranks: self.ranks, tensor: self.tensor, expert, expert_tensor, order: self.order }
    }

    /// One mesh for each degree of experts, the smallest first.
    pub fn shapes(&self) -> Vec<MeshShape> {
        self.expert.distinct().into_iter().map(|expert| self.shape().at(expert)).collect()
    }

    /// Whether a sequence can go to another tensor group behind any layer.
    ///
    /// # Panics
    /// If a mesh is impossible.
    pub fn has_hosts(&self) -> bool {
        self.shapes().iter().any(|shape| (0..shape.ranks).any(|rank| shape.hosts(rank).len() > 1))
    }

    pub fn bucketing(&self) -> Bucketing {
        Bucketing { bytes: self.bucket_bytes, overlap: self.overlap }
    }
}

fn one() -> usize {
    1
}

fn default_replace_gain() -> f64 {
    0.05
}

fn default_standby() -> bool {
    true
}

fn default_migrate_slack() -> f64 {
    0.25
}

fn default_timeout_s() -> u64 {
    300
}

fn default_bucket_bytes() -> usize {
    2 << 20
}

fn default_overlap() -> bool {
    true
}
