//! The `[moe]` section of a recipe: how many experts, who chooses them, how they are kept busy.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Weighting;
use super::condensation::{ClusterRule, Condense, CondenseGradient, ROWS_COMPETE};
use super::gates::{Causality, Gate, GateChoice, GateKind, Scope};
use crate::limits::{Bounds, Finding};
use crate::parallel::PerLayer;

/// Sizes and losses of the MoE layers. Without the section every layer is dense.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Experts per MoE layer, over all ranks: of all layers, or of each.
    pub experts: PerLayer,
    /// Experts each token is sent to.
    #[serde(default = "default_top_k")]
    pub top_k: usize,
    /// Inner width of one expert; absent means `model.d_ff`.
    #[serde(default)]
    pub d_expert: Option<usize>,
    /// Experts so narrow that the chosen ones together are as wide as the dense feed-forward: `d_ff / top_k`.
    #[serde(default)]
    pub equal_compute: bool,
    /// Which layers are MoE.
    #[serde(default = "default_layers")]
    pub layers: Layers,
    /// Who decides where tokens go.
    #[serde(default)]
    pub gate: GateChoice,
    /// How chosen experts are weighted; absent means the gate's own way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dialect: Option<Dialect>,
    /// Places of an expert, as a multiple of an even share; absent means that nothing is dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity_factor: Option<f64>,
    /// The capacity factor outside training; absent means that of training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_capacity_factor: Option<f64>,
    /// What becomes of routes without a place.
    #[serde(default)]
    pub overflow: Overflow,
    /// In training the router's input is multiplied by uniform numbers that are at most so far from 1; absent means as the
    /// gate has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jitter: Option<f32>,
    /// Probability with which the result of a route is skipped in training; elsewhere results are multiplied by what is left.
    #[serde(default)]
    pub output_masking: f32,
    /// Tokens among which places are given out; absent means the global micro-batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_tokens: Option<usize>,
    /// Nodes, where a gate or a policy speaks of them; independent of the ranks there are.
    #[serde(default = "one")]
    pub logical_nodes: usize,
    /// Experts that every token passes through besides the chosen ones.
    #[serde(default)]
    pub shared_experts: usize,
    /// How rows travel to experts on other ranks and back.
    #[serde(default)]
    pub schedule: ScheduleKind,
    /// Groups of ranks of an expert group that exchange rows in turn in the smart schedule; absent means the most up to
    /// four that divide them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule_groups: Option<usize>,
    /// Whether hot experts visit every rank for a step: [`Shadowing`].
    #[serde(default = "default_shadowing")]
    pub shadowing: String,
    /// Whether of the ranks that see the same token one alone sends it to an expert.
    #[serde(default = "default_drop_duplicates")]
    pub drop_duplicates: bool,
    /// One more network that every token passes through, mixed with the chosen experts in learned proportions.
    #[serde(default)]
    pub residual: bool,
    /// Whether similar tokens that are bound for the same expert share a row, and by which threshold.
    #[serde(default)]
    pub condense: Condense,
    /// Cosine from which tokens count as similar (`condense = "static"`); above 1 nothing is condensed.
    #[serde(default = "default_condense_threshold")]
    pub condense_threshold: f64,
    /// Which tokens receive the gradient of a shared row.
    #[serde(default)]
    pub condense_gradient: CondenseGradient,
    /// Number of consecutive tokens among which clusters are formed; absent means a sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub condense_tokens: Option<usize>,
    /// Which token represents others; absent means an earlier one in causal stacks, and the one with most similar tokens
    /// elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub condense_clusters: Option<ClusterRule>,
    /// Most routes of one expert and group that are compared with each other.
    #[serde(default = "default_condense_compared")]
    pub condense_compared: usize,
    /// Similarities `[S1, S2]` in the layer before above and below which a pair is not compared again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub condense_history: Option<Vec<f64>>,
    /// The threshold at the start and that which it approaches (`condense = "adaptive"`).
    #[serde(default = "default_condense_range")]
    pub condense_range: Vec<f64>,
    /// How fast the adaptive threshold goes as the loss falls.
    #[serde(default = "default_condense_slope")]
    pub condense_slope: f64,
    /// Steps during which the adaptive threshold stays at its start.
    #[serde(default = "default_condense_warmup")]
    pub condense_warmup: u64,
    /// Weight of the load-balancing loss (1.0 when perfectly balanced).
    #[serde(default = "default_balance_weight")]
    pub balance_weight: f32,
    /// Within what loads are compared; absent means the dialect's own, or each sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance_scope: Option<BalanceScope>,
    /// Weight of the router z-loss.
    #[serde(default)]
    pub z_weight: f32,
    /// Steps without routes after which an expert counts as dead.
    #[serde(default = "default_dead_after")]
    pub dead_after: u64,
    /// Steps between sums over all ranks of which experts are chosen together; 0 means that nobody counts it.
    #[serde(default = "default_pairs_every")]
    pub pairs_every: u64,
    /// File to write the routing of every training step to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<PathBuf>,
    /// Recorded file to take the routing of every training step from, instead of from the gate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay: Option<PathBuf>,
}

/// `moe.dialect`: named ways of weighing the chosen, and of the loss that keeps experts busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    Hf,
    Megatron,
    Deepseek,
    Fastmoe,
}

/// What happens to routes that their expert has no place for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overflow {
    /// First choices come before second ones, then earlier tokens; the others are dropped.
    #[default]
    Position,
    /// The larger score keeps its place.
    Probability,
    /// Chance decides (random token selection, Kim et al. 2021).
    Random,
    /// The others go to the best expert that has a place.
    Reroute,
    /// The same, within the node of the full expert.
    Node,
}

/// Within what loads are compared (`docs/gates.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BalanceScope {
    /// Each sequence by itself: independent of mesh, micro-batches and packing.
    #[default]
    Sequence,
    /// The global micro-batch.
    MicroBatch,
    /// The loads of the whole optimizer step before this one; none for noisy gates, whose losses are not of loads.
    GlobalBatch,
}

/// `moe.schedule`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// One exchange there, one back.
    #[default]
    Plain,
    /// Several, so that experts compute on what has arrived while the rest travels.
    Smart,
}

/// Which experts are copied to every rank of their group: `moe.shadowing` (`off`, `auto` or `force:N`), or all of them
/// with `parallel.exchange = "experts"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shadowing {
    Off,
    /// As many of the hottest experts as the measured speeds say will pay.
    Auto,
    /// The n hottest, always.
    Force(usize),
    /// All, in evaluation too: no row travels. No value of `moe.shadowing` says it.
    All,
}

impl Shadowing {
    /// The meaning of a recipe's words; nothing if they have none.
    pub fn parse(text: &str) -> Option<Shadowing> {
        match (text, text.strip_prefix("force:")) {
            ("off", _) => Some(Shadowing::Off),
            ("auto", _) => Some(Shadowing::Auto),
            (_, Some(n)) => n.parse().ok().filter(|&n| n > 0).map(Shadowing::Force),
            _ => None,
        }
    }
}

impl Config {
    /// Whether the schedule cuts groups of so many ranks into equal ones.
    pub fn schedules(&self, expert: usize) -> bool {
        self.schedule_groups.is_none_or(|groups| expert.is_multiple_of(groups))
    }

    /// A layer of `experts` experts, `top_k` a token, and defaults for the rest.
    pub fn of(experts: usize, top_k: usize) -> Config {
        Config {
            experts: experts.into(),
            top_k,
            d_expert: None,
            equal_compute: false,
            layers: default_layers(),
            gate: GateChoice::default(),
            dialect: None,
            capacity_factor: None,
            eval_capacity_factor: None,
            jitter: None,
            output_masking: 0.0,
            overflow: Overflow::default(),
            group_tokens: None,
            logical_nodes: one(),
            shared_experts: 0,
            schedule: ScheduleKind::default(),
            schedule_groups: None,
            shadowing: default_shadowing(),
            drop_duplicates: default_drop_duplicates(),
            residual: false,
            condense: Condense::default(),
            condense_threshold: default_condense_threshold(),
            condense_gradient: CondenseGradient::default(),
            condense_tokens: None,
            condense_clusters: None,
            condense_compared: default_condense_compared(),
            condense_history: None,
            condense_range: default_condense_range(),
            condense_slope: default_condense_slope(),
            condense_warmup: default_condense_warmup(),
            balance_weight: default_balance_weight(),
            balance_scope: None,
            z_weight: 0.0,
            dead_after: default_dead_after(),
            pairs_every: default_pairs_every(),
            record: None,
            replay: None,
        }
    }

    /// Inner width of one expert in a model whose dense feed-forwards have `d_ff`.
    pub fn expert_width(&self, d_ff: usize) -> usize {
        let own = if self.equal_compute { d_ff / self.top_k } else { d_ff };
        self.d_expert.unwrap_or(own)
    }

    /// Why the size of a micro-batch is part of the mathematics, if it is; rows have so many tokens, by stack.
    pub fn asks_the_micro_batch(&self, row_lengths: &[usize]) -> Option<&'static str> {
        let competes = "tokens of a micro-batch compete for places (moe.group_tokens does not divide model.seq)";
        let selector = self.widest().selector();
        let balances = "loads are balanced within a micro-batch (moe.balance_scope, or by moe.dialect)";
        let competes = row_lengths.iter().any(|&seq| selector.asks_the_micro_batch(seq)).then_some(competes);
        competes.or((self.scope() == BalanceScope::MicroBatch).then_some(balances))
    }

    /// What `shadowing` says.
    ///
    /// # Panics
    /// If it says nothing: configuration has been checked before.
    pub fn shadowing(&self) -> Shadowing {
        Shadowing::parse(&self.shadowing).unwrap_or_else(|| panic!("moe.shadowing = {:?}", self.shadowing))
    }

    /// Groups that `ranks` of an expert group are cut into for the schedule.
    pub fn schedule_groups(&self, ranks: usize) -> usize {
        match self.schedule {
            ScheduleKind::Plain => 1,
            ScheduleKind::Smart => self.schedule_groups.unwrap_or_else(|| most_groups(ranks)),
        }
    }

    /// Routes that a token has on average where experts choose among tokens; absent where tokens choose.
    pub fn chosen_per_token(&self) -> Option<f64> {
        self.gate().chosen_per_token()
    }

    /// The gate, for questions whose answer does not depend on the number of experts.
    pub(super) fn gate(&self) -> Arc<dyn Gate> {
        self.widest().gate()
    }

    /// How chosen experts are weighted by a gate whose own way is `own`.
    pub fn weighting(&self, own: Weighting) -> Weighting {
        self.dialect.map_or(own, Dialect::weighting)
    }

    /// How the gate weights chosen experts.
    pub fn weighs(&self) -> Weighting {
        self.gate().weighting()
    }

    /// Whether padding has no part in what the gate decides.
    pub fn skips_padding(&self) -> bool {
        self.gate().skips_padding()
    }

    /// Why a causal model cannot have the gate, if it cannot.
    pub fn breaks_causality(&self) -> Option<&'static str> {
        if let Causality::Broken(how) = self.gate().causality() { Some(how) } else { None }
    }

    /// How the gate lets later tokens decide about earlier ones in part, if it does.
    pub fn bends_causality(&self) -> Option<&'static str> {
        if let Causality::Bent(how) = self.gate().causality() { Some(how) } else { None }
    }

    /// Whether tokens of a routing group compete without a capacity, too.
    pub fn gate_competes(&self) -> bool {
        self.gate().scope() != Scope::Token
    }

    /// Whether what it does depends on `logical_nodes`.
    pub fn reads_nodes(&self) -> bool {
        self.gate.keys().knows_nodes() || (self.overflow == Overflow::Node && self.capacity_factor.is_some())
    }

    /// Why tokens cannot share rows, if the gate does not allow it.
    pub fn rows_are_not_alike(&self) -> Option<&'static str> {
        self.gate_competes().then_some(ROWS_COMPETE)
    }

    /// Keys of the gate that do not fit the section.
    pub fn gate_misfits(&self) -> Vec<(&'static str, Finding)> {
        self.gate.keys().misfits(self)
    }

    /// Why the gate moves nothing, if it does not.
    pub fn idle_gate(&self) -> Option<&'static str> {
        self.gate.keys().idle(self)
    }

    /// The keys that the gate of a name has, with the values they may take.
    pub fn keys_of_gate(name: &str) -> &'static [(&'static str, Bounds)] {
        GateKind::of(name).map_or(&[], GateKind::bounds)
    }

    /// The gates that have such a key.
    pub fn gates_with(key: &str) -> Vec<String> {
        let has = |kind: &&GateKind| kind.bounds().iter().any(|(own, _)| *own == key);
        GateKind::ALL.iter().filter(has).map(|kind| kind.name()).collect()
    }
}

/// `"all"`, `{ every = 2 }` (the 2nd, 4th, ... layer) or `{ list = [1, 3] }` (layers counted from 0).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layers {
    All,
    Every(usize),
    List(Vec<usize>),
}

impl Layers {
    /// Whether layer `index` (from 0) is MoE.
    pub fn contains(&self, index: usize) -> bool {
        match self {
            Layers::All => true,
            Layers::Every(n) => (index + 1).is_multiple_of(*n),
            Layers::List(list) => list.contains(&index),
        }
    }

    /// How many MoE layers there are before layer `index`.
    pub fn before(&self, index: usize) -> usize {
        match self {
            Layers::All => index,
            Layers::Every(n) => index / n,
            Layers::List(_) => (0..index).filter(|&before| self.contains(before)).count(),
        }
    }
}

fn default_drop_duplicates() -> bool {
    true
}

fn default_condense_threshold() -> f64 {
    0.9
}

fn default_condense_compared() -> usize {
    256
}

fn default_condense_range() -> Vec<f64> {
    vec![0.95, 0.88]
}

fn default_condense_slope() -> f64 {
    4.0
}

fn default_condense_warmup() -> u64 {
    20
}

fn default_shadowing() -> String {
    "off".to_owned()
}

fn most_groups(ranks: usize) -> usize {
    (1..=4).rev().find(|&groups| ranks.is_multiple_of(groups)).unwrap_or(1)
}

fn default_top_k() -> usize {
    2
}

fn default_layers() -> Layers {
    Layers::All
}

fn default_balance_weight() -> f32 {
    0.01
}

fn default_dead_after() -> u64 {
    20
}

fn default_pairs_every() -> u64 {
    100
}

fn one() -> usize {
    1
}
