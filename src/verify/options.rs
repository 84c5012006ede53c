//! What is varied, as a table: each line an option, its values, and how far a value may move the numbers.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use crate::config::{Config, TrainedPart};
use crate::moe::Condense;
use crate::parallel::{self, AllToAll, MeshShape, Migrate, Nodes};

/// Why numbers may move, from the strictest: what a layout is compared with, and how closely, follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NumericChange {
    /// Nothing may move: to the bit like the same mesh without the option.
    Nothing,
    /// The same numbers are added in another order.
    Order,
    /// Numbers are stored in half the bits.
    Storage,
}

/// What is done between two steps of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Between {
    Nothing,
    /// The loss is taken on some rows, without training on them.
    Evaluation,
    /// All state is written, and the run goes on from what is read.
    Checkpoint,
    /// The same by way of a copy of the state, and in files of few bytes.
    Copy,
}

/// One value of an option.
#[derive(Clone, Debug)]
pub(super) struct OptionValue {
    /// In the names of layouts.
    pub(super) label: String,
    /// As `key=value`; without a value, the key is absent.
    pub(super) set: Vec<String>,
    pub(super) between: Between,
    /// How far this value may move the numbers, if not as far as the others.
    pub(super) cause: Option<NumericChange>,
    /// Whether the recipe computes something else with it. What has such a value is compared with one rank that has it,
    /// too.
    pub(super) is_another_recipe: bool,
}

/// One line of the table.
pub(super) struct Knob {
    pub(super) name: &'static str,
    pub(super) cause: NumericChange,
    /// Other options, beside whose values this one adds the same numbers in another order.
    pub(super) reorders_beside: &'static [&'static str],
    /// For a recipe and so many ranks; the first is the plain one, which the reference has.
    pub(super) values: fn(&Config, usize) -> Vec<OptionValue>,
    /// Why the option keeps its plain value with this recipe: its mathematics depend on it, or forbid another.
    pub(super) fixed: fn(&Config) -> Option<&'static str>,
    /// Why values of the option do nothing in a layout that has one.
    pub(super) idle: fn(&Config) -> Option<&'static str>,
}

/// The names of all options.
pub fn options() -> Vec<&'static str> {
    KNOBS.iter().map(|knob| knob.name).collect()
}

const fn knob(name: &'static str, cause: NumericChange, values: fn(&Config, usize) -> Vec<OptionValue>) -> Knob {
    Knob { name, cause, reorders_beside: &[], values, fixed: |_| None, idle: |_| None }
}

/// The name of the option that cuts a step.
pub(super) const MICRO_BATCH: &str = "micro_batch";

/// The mesh comes first: it decides what else is possible.
pub(super) const KNOBS: &[Knob] = &[
    knob("mesh", NumericChange::Order, meshes),
    knob("order", NumericChange::Order, |_, _| of("parallel.order", &["expert_data", "data_expert"])),
    knob("sequence", NumericChange::Order, |_, _| of("parallel.sequence", &["false", "true"])),
    knob("expert_table", NumericChange::Order, expert_tables),
    knob("replace", NumericChange::Order, |_, _| replacing()),
    Knob {
        fixed: |config| config.moe.as_ref()?.asks_the_micro_batch(&config.model.row_lengths()),
        ..knob(MICRO_BATCH, NumericChange::Order, micro_batches)
    },
    knob("threads", NumericChange::Order, |_, _| of("parallel.threads", &["1", "2"])),
    knob("schedule", NumericChange::Order, |_, _| of("moe.schedule", &["plain", "smart"])),
    // Not "auto": what it decides hangs on speeds that are measured anew in every run.
    knob("shadowing", NumericChange::Order, |_, _| of("moe.shadowing", &["off", "force:1"])),
    knob("exchange", NumericChange::Order, |_, _| of("parallel.exchange", &["tokens", "experts"])),
    // Experts that change ranks go by nodes, too.
    Knob {
        reorders_beside: &["replace"],
        idle: |config| goes_straight(&config.parallel),
        ..knob("all_to_all", NumericChange::Nothing, |_, _| ways())
    },
    // Not "auto": it goes by measured speeds, too.
    Knob {
        idle: |config| config.sequences_stay().filter(|_| config.parallel.migrate != Migrate::Off),
        ..knob("migrate", NumericChange::Order, |_, _| of("parallel.migrate", &["off", "force"]))
    },
    Knob {
        fixed: |config| config.moe.as_ref()?.rows_are_not_alike(),
        ..knob("condense", NumericChange::Nothing, condensing)
    },
    Knob { fixed: trains_a_part, ..knob("lora", NumericChange::Nothing, |config, _| adapting(config)) },
    knob("dtype", NumericChange::Storage, |_, _| of("train.dtype", &["f32", "bf16"])),
    // Where rows leave in several parts, gradients of a token's copies are added up part by part, or all at once. Sequences that
    // migrate go elsewhere, since it is another rank that sends a row.
    Knob {
        reorders_beside: &["schedule", "shadowing", "exchange", "migrate"],
        ..knob("drop_duplicates", NumericChange::Nothing, |_, _| of("moe.drop_duplicates", &["true", "false"]))
    },
    knob("standby", NumericChange::Nothing, |_, _| of("parallel.standby", &["true", "false"])),
    knob("overlap", NumericChange::Nothing, |_, _| of("parallel.overlap", &["true", "false"])),
    knob("bucket_bytes", NumericChange::Nothing, |_, _| of("parallel.bucket_bytes", &["2097152", "1"])),
    knob("zero", NumericChange::Nothing, |_, _| zero()),
    knob("tile", NumericChange::Nothing, |_, _| of("memory.tile", &["", "100"])),
    knob("offload", NumericChange::Nothing, |_, _| of("memory.offload", &["none", "host", "file"])),
    knob("recompute", NumericChange::Nothing, |_, _| recomputed()),
    knob("between_steps", NumericChange::Nothing, |_, _| between()),
];

/// Values of one key.
fn of(key: &str, values: &[&str]) -> Vec<OptionValue> {
    values.iter().map(|value| OptionValue::new(*value, vec![format!("{key}={value}")])).collect()
}

impl OptionValue {
    fn new(label: impl Into<String>, set: Vec<String>) -> OptionValue {
        let (between, cause) = (Between::Nothing, None);
        OptionValue { label: label.into(), set, between, cause, is_another_recipe: false }
    }
}

/// Of a recipe that condenses nothing: nothing, a threshold that no tokens reach, and one at which tokens share rows. Of one
/// that does: what it does, and nothing.
fn condensing(config: &Config, _: usize) -> Vec<OptionValue> {
    let off = || OptionValue::new("off", vec!["moe.condense=off".to_owned()]);
    let at = |threshold: &str| vec!["moe.condense=static".to_owned(), format!("moe.condense_threshold={threshold}")];
    let own = config.moe.as_ref().map(|moe| moe.condense).filter(|condense| *condense != Condense::Off);
    match own {
        None => {
            let shares = OptionValue { is_another_recipe: true, ..OptionValue::new("0.8", at("0.8")) };
            vec![off(), OptionValue::new("above 1", at("1.5")), shares]
        }
        Some(own) => {
            let own = own.name();
            let plain = OptionValue::new(own, vec![format!("moe.condense={own}")]);
            vec![plain, OptionValue { is_another_recipe: true, ..off() }]
        }
    }
}

/// Adapters of all that can have some, which are trained in the model's stead.
fn adapting(config: &Config) -> Vec<OptionValue> {
    let experts = format!("lora.experts={}", config.moe.is_some());
    let set = vec!["train.only=lora".to_owned(), "lora.rank=2".to_owned(), experts];
    let adapts = OptionValue { is_another_recipe: true, ..OptionValue::new("of rank 2", set) };
    vec![OptionValue::new("off", Vec::new()), adapts]
}

fn trains_a_part(config: &Config) -> Option<&'static str> {
    let part = config.only() != TrainedPart::All || !config.train.freeze.is_empty();
    part.then_some("the recipe says which part is trained (train.only, train.freeze, [lora])")
}

/// From the second stage on gradients of micro-batches are summed over ranks before they are summed with each other.
fn zero() -> Vec<OptionValue> {
    let mut values = of("parallel.zero", &["0", "1", "2", "3"]);
    values[2..].iter_mut().for_each(|value| value.cause = Some(NumericChange::Order));
    values
}

/// With any gain, so that experts move as often as they can.
fn replacing() -> Vec<OptionValue> {
    let set = |every: &str| vec![format!("parallel.replace_every={every}"), "parallel.replace_gain=0".to_owned()];
    vec![OptionValue::new("off", vec!["parallel.replace_every=0".to_owned()]), OptionValue::new("every step", set("1"))]
}

/// From node to node, over links that cost nothing: nodes of two ranks, and of three, so that one may have fewer.
fn ways() -> Vec<OptionValue> {
    let value = |way: &str, ranks: usize| {
        let link = format!("parallel.node_link={{ranks_per_node={ranks},latency_us=0,gbytes_per_s=1000}}");
        OptionValue::new(format!("{way} on nodes of {ranks}"), vec![format!("parallel.all_to_all={way}"), link])
    };
    let direct = vec!["parallel.all_to_all=direct".to_owned(), "parallel.node_link=".to_owned()];
    vec![OptionValue::new("direct", direct), value("two_d", 2), value("two_level", 3)]
}

fn goes_straight(parallel: &parallel::Config) -> Option<&'static str> {
    let link = parallel.node_link.filter(|_| parallel.all_to_all != AllToAll::Direct)?;
    let nodes = Nodes::of_consecutive(parallel.ranks, link.ranks_per_node);
    let differs = parallel.shapes().iter().any(|shape| nodes.may_gather_experts(shape));
    (!differs).then_some("no expert group has ranks on several nodes and several of them on one")
}

fn recomputed() -> Vec<OptionValue> {
    let mut values = of("memory.recompute", &["none", "operations", "block", "block"]);
    values[3].label += " with communication";
    values[3].set.push("memory.keep_communication=false".to_owned());
    values
}

fn between() -> Vec<OptionValue> {
    let all = [
        ("nothing", Between::Nothing),
        ("evaluation", Between::Evaluation),
        ("checkpoint", Between::Checkpoint),
        ("copied checkpoint", Between::Copy),
    ];
    all.map(|(label, between)| OptionValue { between, ..OptionValue::new(label, Vec::new()) }).into()
}

/// Every mesh of up to `ranks` ranks, the smallest first.
fn meshes(config: &Config, ranks: usize) -> Vec<OptionValue> {
    let experts = config.moe.as_ref().map_or(1, |moe| moe.shared_divisor());
    let of_size = |size| {
        let shapes = MeshShape::of(size, 1).nearest(experts);
        let mixed = mixed(config, &shapes).or_else(|| furthest(config, size));
        shapes.iter().map(mesh).chain(mixed).collect::<Vec<_>>()
    };
    (1..=ranks).flat_map(of_size).collect()
}

/// One mesh of several degrees, with slices if there are ranks enough: layers with experts take turns between the two
/// largest.
fn mixed(config: &Config, shapes: &[MeshShape]) -> Option<OptionValue> {
    let layers = config.moe.as_ref()?.of_layers(config.model.layers).len();
    let of_slices = |slices: usize| {
        let fit = |shape: &&MeshShape| shape.tensor == slices && shape.expert_tensor == slices;
        let mut fitting: Vec<&MeshShape> = shapes.iter().filter(fit).collect();
        fitting.sort_unstable_by_key(|shape| Reverse(shape.expert));
        Some([fitting.first()?.expert, fitting.get(1)?.expert]).map(|two| (two, fitting[0].at(1)))
    };
    let (two, shape) = [2, 1].into_iter().find_map(of_slices).filter(|_| layers > 1)?;
    Some(mesh_of_degrees(&shape, &two.iter().copied().cycle().take(layers).collect::<Vec<_>>()))
}

/// Where layers have different numbers of experts: each spreads them as far as so many ranks can share them evenly.
fn furthest(config: &Config, ranks: usize) -> Option<OptionValue> {
    let moe = config.moe.as_ref().filter(|moe| moe.experts.list().is_some())?;
    let shared = |experts: usize| (1..=ranks).rev().find(|n| ranks.is_multiple_of(*n) && experts.is_multiple_of(*n));
    let layers = moe.of_layers(config.model.layers).into_iter();
    let degrees: Vec<usize> = layers.filter_map(|(_, moe)| shared(moe.experts)).collect();
    degrees.iter().any(|degree| *degree != degrees[0]).then(|| mesh_of_degrees(&MeshShape::of(ranks, 1), &degrees))
}

fn mesh_of_degrees(shape: &MeshShape, degrees: &[usize]) -> OptionValue {
    let mut value = mesh(shape);
    value.label += &format!(" expert {degrees:?}");
    value.set.push(format!("parallel.expert={degrees:?}"));
    value
}

fn mesh(shape: &MeshShape) -> OptionValue {
    let MeshShape { ranks, tensor, expert, expert_tensor, .. } = *shape;
    let degrees = [("tensor", tensor), ("expert", expert)];
    let mut label = format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" });
    let mut set = vec![format!("parallel.ranks={ranks}")];
    for (name, degree) in degrees {
        set.push(format!("parallel.{name}={degree}"));
        if degree > 1 {
            label += &format!(" {name} {degree}");
        }
    }
    if tensor > 1 && expert_tensor == 1 {
        label += " whole experts";
        set.push("parallel.expert_tensor=1".to_owned());
    }
    if ranks == 1 {
        set.push("parallel.expert_tensor=".to_owned());
    }
    OptionValue::new(label, set)
}

/// Uneven, descending shares for every degree there may be.
fn expert_tables(config: &Config, ranks: usize) -> Vec<OptionValue> {
    // A table is of as many experts in every layer.
    let experts = config.moe.as_ref().filter(|moe| moe.experts.list().is_none()).map_or(1, |moe| moe.experts.largest());
    let absent = OptionValue::new("even", vec!["parallel.expert_table=".into()]);
    let degrees = (2..=ranks.min(experts)).filter(|degree| experts.is_multiple_of(*degree));
    let uneven = degrees.map(|degree| {
        let skewed = usize::from(experts > degree);
        let owner = |expert: usize| degree - 1 - expert.saturating_sub(skewed) % degree;
        let table = (0..experts).map(|expert| owner(expert).to_string()).collect::<Vec<_>>().join(", ");
        OptionValue::new(format!("uneven over {degree}"), vec![format!("parallel.expert_table=[{table}]")])
    });
    [absent].into_iter().chain(uneven).collect()
}

/// The recipe's own, one so small that it leaves ranks without rows, and single rows: as many sums as a step can have.
fn micro_batches(config: &Config, ranks: usize) -> Vec<OptionValue> {
    let rows = config.rows_per_step();
    let own = config.train.micro_batch.unwrap_or(rows);
    let small = (1..ranks.max(2)).rev().find(|size| rows.is_multiple_of(*size)).unwrap_or(1);
    let mut sizes = vec![own];
    for size in [small, 1, rows] {
        let is_last_resort = size == rows;
        if !sizes.contains(&size) && (!is_last_resort || sizes.len() == 1) {
            sizes.push(size);
        }
    }
    let sizes: Vec<String> = sizes.iter().map(ToString::to_string).collect();
    of("train.micro_batch", &sizes.iter().map(String::as_str).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_values_of_an_option_are_the_same() {
        let text = "[run]\ndir = \"r\"\n[train]\nsteps = 1\nbatch_tokens = 48\nlr = 1.0\n[model]\nvocab = 300\n\
                    d_model = 4\nlayers = 1\nheads = 1\nseq = 2\n[moe]\nexperts = 6\n[data]\nsources = [\"t\"]\n\
                    [parallel]\n[memory]\n[metrics]\n";
        let config: Config = toml::from_str(text).expect("a recipe");
        for knob in KNOBS {
            let values = (knob.values)(&config, 8);
            assert!(values.len() > 1, "{} does not vary", knob.name);
            for (i, value) in values.iter().enumerate() {
                let same = |other: &&OptionValue| {
                    other.label == value.label || (&other.set, other.between) == (&value.set, value.between)
                };
                assert!(values[i + 1..].iter().find(same).is_none(), "{}: {value:?}", knob.name);
            }
        }
    }
}
