//! What the keys of `[parallel]` may be together: degrees that make a mesh, and keys that a mesh leaves unused.

use super::Config;
use super::rules::{Rule, Unused, conflict, list_fits};
use super::zero::is_alone;
use crate::limits::{Finding, common_divisor, divisors, nearest_of};
use crate::moe::ScheduleKind;
use crate::parallel::{AllToAll, Backend, Exchange, PerLayer};

pub(super) const RULES: &[Rule] = &[
    Rule {
        key: "moe.drop_duplicates",
        reads: &["moe.drop_duplicates", "parallel.tensor", "parallel.expert_tensor"],
        check: whole_experts_see_no_duplicates,
    },
    Rule {
        key: "parallel.tensor",
        reads: &[
            "parallel.tensor",
            "parallel.ranks",
            "model.heads",
            "model.kv_heads",
            "model.d_ff",
            "model.layers",
            "moe.layers",
        ],
        check: tensor_cuts,
    },
    Rule {
        key: "parallel.expert_tensor",
        reads: &["parallel.expert_tensor", "parallel.tensor"],
        check: experts_are_whole_or_sliced,
    },
    Rule {
        key: "parallel.expert",
        reads: &[
            "parallel.expert",
            "parallel.ranks",
            "moe.experts",
            "moe.layers",
            "model.layers",
            "parallel.tensor",
            "parallel.expert_tensor",
            "parallel.expert_table",
        ],
        check: experts_spread,
    },
    Rule {
        key: "parallel.expert",
        reads: &["parallel.expert", "moe.layers", "model.layers"],
        check: every_layer_has_a_degree,
    },
    Rule {
        key: "moe.shadowing",
        reads: &[
            "moe.shadowing",
            "moe.layers",
            "model.layers",
            "parallel.ranks",
            "parallel.tensor",
            "parallel.expert",
            "parallel.expert_tensor",
            "parallel.order",
        ],
        check: peers_shadow_alike,
    },
    Rule {
        key: "parallel.expert_table",
        reads: &["parallel.expert_table", "parallel.expert", "moe.experts"],
        check: expert_table_fits,
    },
    Rule {
        key: "parallel.exchange",
        reads: &["parallel.exchange", "moe.shadowing", "moe.schedule"],
        check: experts_or_rows_travel,
    },
];

fn whole_experts_see_no_duplicates(config: &Config) -> Option<Finding> {
    let (moe, shape) = (config.moe.as_ref()?, config.parallel.shape());
    if moe.drop_duplicates || shape.tensor == 1 || shape.expert_tensor > 1 {
        return None;
    }
    let wrong =
        format!("whole experts (parallel.expert_tensor = 1) would be trained {} times by each token", shape.tensor);
    conflict(wrong, "set it to true, or slice the experts: leave parallel.expert_tensor out")
}

/// Tensor groups share out the ranks, and the model is cut evenly over each.
fn tensor_cuts(config: &Config) -> Option<Finding> {
    let (tensor, ranks) = (config.parallel.tensor, config.parallel.ranks);
    let (divides, uneven) = (ranks.is_multiple_of(tensor), uneven_over(config, tensor));
    let wrong = match (divides, uneven.is_empty()) {
        (true, true) => return None,
        (true, false) => format!("does not cut {} into equal slices", uneven.join(" nor ")),
        (false, _) => format!("impossible mesh: does not divide parallel.ranks = {ranks}"),
    };
    let valid = divisors(ranks).into_iter().filter(|&tensor| uneven_over(config, tensor).is_empty());
    conflict(wrong, nearest_of(tensor, &valid.collect::<Vec<usize>>()))
}

/// What of the model so many ranks do not cut evenly, in words.
fn uneven_over(config: &Config, tensor: usize) -> Vec<String> {
    let uneven = config.model.uneven_over(tensor, config.moe.as_ref());
    uneven.into_iter().map(|(key, size)| format!("{key} = {size}")).collect()
}

fn experts_are_whole_or_sliced(config: &Config) -> Option<Finding> {
    let (slices, tensor) = (config.parallel.expert_tensor?, config.parallel.tensor);
    if slices == 1 || slices == tensor {
        return None;
    }
    let wrong = format!("neither 1 (whole experts) nor parallel.tensor = {tensor} (sliced like all else)");
    conflict(wrong, nearest_of(slices, &if tensor == 1 { vec![1] } else { vec![1, tensor] }))
}

/// A layer whose experts are spread over ranks, or all such layers where they do not differ.
struct SpreadLayer {
    degree: usize,
    /// What precedes the degree in messages: the layer that has it, where degrees may differ.
    told: String,
    /// How many are shared evenly: all, or none where a table says which rank holds what.
    experts: usize,
    /// The key that says so; with the layer, where their numbers differ.
    of: String,
}

fn of_layers(config: &Config) -> Vec<SpreadLayer> {
    let (degrees, Some(moe)) = (&config.parallel.expert, &config.moe) else { return Vec::new() };
    let shared = |experts: usize| if config.parallel.expert_table.is_some() { 0 } else { experts };
    let layer = |(index, degree, experts): (usize, usize, usize)| SpreadLayer {
        degree,
        told: degrees.list().map(|_| format!("{degree} of layer {index} ")).unwrap_or_default(),
        experts: shared(experts),
        of: match moe.experts.list() {
            None => format!("moe.experts = {experts}"),
            Some(_) => format!("the {experts} experts of layer {index} (moe.experts)"),
        },
    };
    if degrees.list().or(moe.experts.list()).is_none() {
        return vec![layer((0, degrees.largest(), moe.experts.largest()))];
    }
    let layers = moe.of_layers(config.model.layers);
    let degrees = degrees.of_layers(layers.len());
    layers.iter().zip(degrees).map(|((index, moe), degree)| layer((*index, degree, moe.experts))).collect()
}

fn every_layer_has_a_degree(config: &Config) -> Option<Finding> {
    list_fits(config, config.parallel.expert.list()?)
}

fn experts_spread(config: &Config) -> Option<Finding> {
    let (ranks, shape) = (config.parallel.ranks, config.parallel.shape());
    let Some(moe) = &config.moe else {
        let wrong = "there are no experts to spread, the recipe has no [moe] section";
        let remedy = "set it to 1, or add [moe] with experts";
        return (shape.expert > 1 || config.parallel.expert.list().is_some()).then(|| Finding::new(wrong, remedy));
    };
    // What makes a mesh impossible whatever this key says is its own problem.
    let slices = if ranks.is_multiple_of(shape.expert_tensor) { shape.expert_tensor } else { 1 };
    let lane = match slices {
        1 => format!("parallel.ranks = {ranks}"),
        _ => format!("parallel.ranks / parallel.expert_tensor = {}", ranks / slices),
    };
    let degrees = of_layers(config);
    let uneven = |SpreadLayer { degree, told, experts, of }: &SpreadLayer| {
        let wholes = [(&lane, ranks / slices), (of, *experts)].into_iter();
        let uneven = wholes.filter(|(_, whole)| !whole.is_multiple_of(*degree));
        let uneven: Vec<&str> = uneven.map(|(what, _)| what.as_str()).collect();
        (!uneven.is_empty()).then(|| format!("{told}does not divide {}", uneven.join(" nor ")))
    };
    let mut wrong: Vec<String> = degrees.iter().filter_map(uneven).collect();
    wrong.dedup();
    if wrong.is_empty() {
        return None;
    }
    let shared = if config.parallel.expert_table.is_some() { 0 } else { moe.shared_divisor() };
    let valid: Vec<String> = divisors(common_divisor(ranks / slices, shared)).iter().map(ToString::to_string).collect();
    let all = |divides: &dyn Fn(usize) -> bool| degrees.iter().all(|layer| divides(layer.degree));
    let table = if moe.experts.list().is_some() {
        ", or a list of one for each layer"
    } else if config.parallel.shapes().len() == 1 && all(&|e| (ranks / slices).is_multiple_of(e)) {
        ", or give every expert its rank in parallel.expert_table"
    } else {
        ""
    };
    let whole = if slices > 1 && all(&|expert| ranks.is_multiple_of(expert) && shared.is_multiple_of(expert)) {
        ", or keep experts whole with parallel.expert_tensor = 1"
    } else {
        ""
    };
    let wrong = format!("impossible mesh: {}", wrong.join("; "));
    conflict(wrong, format!("valid values: {}{table}{whole}", valid.join(", ")))
}

fn peers_shadow_alike(config: &Config) -> Option<Finding> {
    let (moe, shape) = (config.moe.as_ref()?, config.parallel.shape());
    if moe.shadowing == "off" {
        return None;
    }
    let differs = |layer: &SpreadLayer| {
        let shape = shape.at(layer.degree);
        shape.is_possible() && !shape.peers_meet_the_same()
    };
    let told = of_layers(config).into_iter().find(differs)?.told;
    let layer = if told.is_empty() { told } else { format!(" (parallel.expert: {})", told.trim_end()) };
    let wrong = format!(
        "ranks that see the same tokens (parallel.tensor) are in expert groups that see different ones, and would \
         shadow different experts{layer}"
    );
    conflict(wrong, "set it to \"off\", or parallel.expert to a multiple of parallel.tensor, or slice the experts")
}

fn expert_table_fits(config: &Config) -> Option<Finding> {
    let (table, expert) = (config.parallel.expert_table.as_ref()?, config.parallel.expert.largest());
    let Some(moe) = &config.moe else {
        return conflict(
            "there are no experts, the recipe has no [moe] section",
            "leave it out, or add [moe] with experts",
        );
    };
    if config.parallel.expert.distinct().len() > 1 {
        let wrong = format!("says who holds which expert in groups of one size, not of {}", config.parallel.expert);
        return conflict(wrong, "leave it out, or give parallel.expert as one number");
    }
    if moe.experts.list().is_some() {
        let wrong = format!("says who holds which expert in layers of as many, not of moe.experts = {}", moe.experts);
        return conflict(wrong, "leave it out: every rank then has an equal share of each layer's");
    }
    if PerLayer::Same(table.len()) != moe.experts {
        let wrong = format!("has {} entries, moe.experts is {}", table.len(), moe.experts);
        return conflict(wrong, format!("name the rank of each of the {} experts", moe.experts));
    }
    if let Some(rank) = table.iter().find(|rank| **rank >= expert) {
        let wrong = format!("there is no rank {rank} in a group of parallel.expert = {expert}");
        return conflict(wrong, format!("ranks of a group count from 0, the last one is {}", expert - 1));
    }
    let idle = (0..expert).find(|rank| !table.contains(rank))?;
    let wrong = format!("rank {idle} of {expert} would hold no expert");
    conflict(wrong, "give every rank at least one, or lower parallel.expert")
}

/// Keys that are about rows on their way, beside an exchange that sends none.
fn experts_or_rows_travel(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|_| config.parallel.exchange == Exchange::Experts)?;
    let shadows = format!("moe.shadowing = {:?}", moe.shadowing);
    let all = [
        (moe.shadowing != "off", shadows.as_str(), "moe.shadowing to \"off\""),
        (moe.schedule == ScheduleKind::Smart, "moe.schedule = \"smart\"", "moe.schedule to \"plain\""),
    ];
    let (keys, remedies): (Vec<_>, Vec<_>) = all.into_iter().filter(|key| key.0).map(|key| (key.1, key.2)).unzip();
    if keys.is_empty() {
        return None;
    }
    let wrong = format!("excludes {}: all experts visit every rank, and no row travels", keys.join(" and "));
    conflict(wrong, format!("set {}, or parallel.exchange to \"tokens\"", remedies.join(" and ")))
}

fn link_is_idle(config: &Config) -> Option<&'static str> {
    let alone = config.parallel.node_link.is_some_and(|link| link.ranks_per_node == 1);
    one_rank(config).or(alone.then_some("with parallel.node_link.ranks_per_node = 1 every message crosses nodes"))
}

fn node_link_is_idle(config: &Config) -> Option<&'static str> {
    let nodes = config.parallel.node_link.map(|link| config.parallel.ranks.div_ceil(link.ranks_per_node));
    one_rank(config).or((nodes == Some(1)).then_some("all ranks are on one node"))
}

/// Nothing travels between ranks where there is one.
fn one_rank(config: &Config) -> Option<&'static str> {
    (config.parallel.ranks == 1).then_some("parallel.ranks = 1 has nobody to send to")
}

/// What the holders of weights hang on.
const HELD_BY: &[&str] = &[
    "parallel.ranks",
    "parallel.tensor",
    "parallel.sequence",
    "parallel.expert",
    "parallel.expert_tensor",
    "model.heads",
    "model.kv_heads",
    "moe.experts",
    "train.only",
    "train.freeze",
];

/// Gradients travel between ranks that hold the same weight, or parts of a sum: of split tokens, of heads that several
/// ranks use.
fn gradients_stay(config: &Config) -> Option<&'static str> {
    let kv_heads = config.model.kv_heads.unwrap_or(config.model.heads);
    let parts = config.parallel.sequence || !kv_heads.is_multiple_of(config.parallel.tensor);
    let alone = is_alone(config) && !parts;
    let shapes = config.parallel.shapes();
    let experts_alone = config.trains_experts_alone() && shapes.iter().all(|shape| shape.expert_data() == 1);
    one_rank(config)
        .or(alone.then_some("every weight is on one rank alone, and so is its gradient"))
        .or(experts_alone.then_some("experts alone are trained, and each is on one rank alone"))
}

fn accelerators_compute(config: &Config) -> Option<&'static str> {
    (config.parallel.backend != Backend::Cpu).then_some("only the CPU's threads do each other's work")
}

/// Nothing travels to an expert where every rank has all of them.
fn rows_stay(config: &Config) -> Option<&'static str> {
    (config.parallel.expert.largest() == 1).then_some("with parallel.expert = 1 no row travels to another rank")
}

/// No way from node to node is taken by rows that stay.
fn all_to_alls_stay(config: &Config) -> Option<&'static str> {
    let all_visit = config.parallel.exchange == Exchange::Experts;
    let stay = no_experts(config).or(rows_stay(config));
    let stay = stay.or(all_visit.then_some("with parallel.exchange = \"experts\" no row travels to another rank"));
    stay.filter(|_| config.parallel.all_to_all != AllToAll::Direct)
}

/// No expert travels where every rank has all of them.
fn experts_stay(config: &Config) -> Option<&'static str> {
    let alone = config.parallel.expert.largest() == 1;
    no_experts(config).or(alone.then_some("with parallel.expert = 1 every rank has all experts"))
}

/// A table that is wrong has its own problem.
fn table_of_one(config: &Config) -> Option<&'static str> {
    let table = config.parallel.expert_table.as_ref()?;
    let fits = config.moe.as_ref()?.experts == PerLayer::Same(table.len()) && table.iter().all(|rank| *rank == 0);
    let alone = fits && config.parallel.expert.largest() == 1;
    alone.then_some("with parallel.expert = 1 every rank has all experts")
}

fn no_experts(config: &Config) -> Option<&'static str> {
    config.moe.is_none().then_some("the recipe has no [moe] section")
}

fn order_is_free(config: &Config) -> Option<&'static str> {
    let shapes = config.parallel.shapes();
    if !shapes.iter().all(|shape| shape.is_possible()) {
        return None;
    }
    let alone = shapes.iter().all(|shape| shape.expert == 1 || shape.expert_data() == 1);
    no_experts(config)
        .or(alone.then_some("of ranks that share experts and ranks that hold the same, one kind is alone"))
}

pub(super) const UNUSED: &[Unused] = &[
    Unused {
        key: "train.check_replicas_every",
        reads: &["parallel.ranks", "parallel.zero"],
        because: |config| match config.parallel.zero {
            _ if config.parallel.ranks == 1 => Some("one rank has no other's copies to compare with"),
            3 => Some("with parallel.zero = 3 no two ranks keep copies of a weight"),
            _ => None,
        },
    },
    Unused {
        key: "moe.drop_duplicates",
        reads: &["parallel.tensor"],
        because: |config| {
            (config.parallel.tensor == 1).then_some("with parallel.tensor = 1 no two ranks see the same token")
        },
    },
    Unused {
        key: "parallel.expert_tensor",
        reads: &["parallel.tensor"],
        because: |config| {
            no_experts(config).or((config.parallel.tensor == 1).then_some("parallel.tensor = 1 slices nothing"))
        },
    },
    Unused {
        key: "parallel.sequence",
        reads: &["parallel.tensor"],
        because: |config| {
            (config.parallel.tensor == 1).then_some("parallel.tensor = 1 has nobody to share tokens with")
        },
    },
    Unused {
        key: "parallel.order",
        reads: &["parallel.ranks", "parallel.expert", "parallel.tensor", "parallel.expert_tensor"],
        because: order_is_free,
    },
    Unused {
        key: "moe.schedule",
        reads: &["moe.schedule", "parallel.expert"],
        because: |config| (config.moe.as_ref()?.schedule != ScheduleKind::Plain).then(|| rows_stay(config))?,
    },
    Unused {
        key: "moe.shadowing",
        reads: &["moe.shadowing", "parallel.expert"],
        because: |config| (config.moe.as_ref()?.shadowing != "off").then(|| rows_stay(config))?,
    },
    Unused {
        key: "moe.schedule_groups",
        reads: &["moe.schedule", "moe.schedule_groups", "parallel.expert"],
        because: |config| (config.moe.as_ref()?.schedule != ScheduleKind::Plain).then(|| rows_stay(config))?,
    },
    Unused {
        key: "parallel.expert_table",
        reads: &["parallel.expert_table", "parallel.expert", "moe.experts"],
        because: table_of_one,
    },
    Unused {
        key: "parallel.exchange",
        reads: &["parallel.exchange", "parallel.expert"],
        because: |config| (config.parallel.exchange == Exchange::Experts).then(|| experts_stay(config))?,
    },
    Unused {
        key: "parallel.all_to_all",
        reads: &["parallel.all_to_all", "parallel.expert", "parallel.exchange"],
        because: all_to_alls_stay,
    },
    Unused {
        key: "parallel.standby",
        reads: &["parallel.ranks", "parallel.backend"],
        because: |config| one_rank(config).or(accelerators_compute(config)),
    },
    Unused { key: "parallel.bucket_bytes", reads: HELD_BY, because: gradients_stay },
    Unused { key: "parallel.overlap", reads: HELD_BY, because: gradients_stay },
    Unused { key: "parallel.link", reads: &["parallel.ranks", "parallel.node_link"], because: link_is_idle },
    Unused { key: "parallel.node_link", reads: &["parallel.ranks"], because: node_link_is_idle },
];
