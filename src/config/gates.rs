//! What `[moe]` may say about gates and experts: keys that must agree, and keys that nothing reads.

use super::Config;
use super::problem::Finding;
use super::rules::{Rule, Unused, divisors, nearest_of};
use crate::moe::{BalanceScope, Dialect, GateKind, Overflow};

pub(super) const RULES: &[Rule] = &[
    Rule { key: "moe.top_k", reads: &["moe.top_k", "moe.gate"], check: gate_has_its_top_k },
    Rule { key: "moe.gate", reads: &["moe.gate", "model.family"], check: causal_models_do_not_look_ahead },
    Rule { key: "moe.logical_workers", reads: &["moe.logical_workers", "moe.experts"], check: workers_divide },
    Rule { key: "moe.logical_nodes", reads: &["moe.logical_nodes", "moe.experts"], check: nodes_divide },
    Rule { key: "moe.groups", reads: &["moe.groups", "moe.experts"], check: groups_divide },
    Rule {
        key: "moe.top_groups",
        reads: &["moe.top_groups", "moe.groups", "moe.experts", "moe.top_k", "moe.gate", "moe.dialect"],
        check: groups_hold_the_choices,
    },
    Rule { key: "moe.record", reads: &["moe.record", "moe.replay"], check: recordings_are_two_files },
    Rule { key: "moe.residual", reads: &["moe.residual", "moe.shared_experts"], check: one_network_beside },
    Rule {
        key: "moe.equal_compute",
        reads: &["moe.equal_compute", "moe.top_k", "moe.experts", "moe.d_expert", "model.d_ff", "model.d_model"],
        check: widths_add_up,
    },
    Rule {
        key: "moe.balance_scope",
        reads: &["moe.balance_scope", "moe.gate", "moe.dialect"],
        check: balance_has_its_loads,
    },
];

pub(super) const UNUSED: &[Unused] = &[
    Unused {
        key: "moe.overflow",
        reads: &["moe.capacity_factor"],
        because: |config| {
            let moe = config.moe.as_ref()?;
            moe.capacity_factor.is_none().then_some("without moe.capacity_factor nothing overflows")
        },
    },
    Unused {
        key: "moe.dialect",
        reads: &["moe.gate"],
        because: |config| match (config.moe.as_ref()?.gate, config.moe.as_ref()?.spoken()) {
            (_, Some(_)) => None,
            (GateKind::Hash, _) => Some("moe.gate = \"hash\" gives all chosen experts one weight"),
            (GateKind::Sinkhorn, _) => Some("moe.gate = \"sinkhorn\" has weights of its own"),
            (GateKind::ExpertChoice, _) => Some("moe.gate = \"expert_choice\" has weights of its own"),
            (GateKind::Sigmoid, _) => Some("moe.gate = \"sigmoid\" has weights of its own"),
            _ => None,
        },
    },
    Unused {
        key: "moe.pairs_every",
        reads: &["moe.gate", "moe.top_k", "moe.experts"],
        because: |config| {
            let moe = config.moe.as_ref()?;
            (!moe.has_pairs()).then_some("pairs are counted where a token chooses two or more of at most 1024 experts")
        },
    },
    Unused {
        key: "moe.balance_scope",
        reads: &["moe.balance_weight", "moe.balance_scope"],
        because: |config| {
            let unweighted = config.moe.as_ref()?.balance_weight == 0.0;
            unweighted.then_some("moe.balance_weight = 0 means no balance loss")
        },
    },
    Unused { key: "moe.groups", reads: &["moe.gate"], because: only_sigmoid },
    Unused { key: "moe.top_groups", reads: &["moe.gate"], because: only_sigmoid },
    Unused { key: "moe.route_scale", reads: &["moe.gate"], because: only_sigmoid },
    Unused { key: "moe.bias_rate", reads: &["moe.gate"], because: only_sigmoid },
    Unused {
        key: "moe.outside",
        reads: &["moe.gate"],
        because: |config| {
            let other = config.moe.as_ref()?.gate != GateKind::Topology;
            other.then_some("only moe.gate = \"topology\" limits what leaves a node")
        },
    },
    Unused {
        key: "moe.logical_workers",
        reads: &["moe.gate"],
        because: |config| {
            let reads = [GateKind::Swipe, GateKind::DistributedCapacity].contains(&config.moe.as_ref()?.gate);
            (!reads).then_some("only the gates \"swipe\" and \"distributed_capacity\" know workers")
        },
    },
    Unused {
        key: "moe.logical_nodes",
        reads: &["moe.gate", "moe.overflow", "moe.capacity_factor"],
        because: |config| {
            let moe = config.moe.as_ref()?;
            let reads =
                moe.gate == GateKind::Topology || (moe.overflow == Overflow::Node && moe.capacity_factor.is_some());
            (!reads).then_some("only moe.gate = \"topology\" and moe.overflow = \"node\" know nodes")
        },
    },
    Unused {
        key: "moe.group_tokens",
        reads: &["moe.gate", "moe.capacity_factor"],
        because: |config| {
            let moe = config.moe.as_ref()?;
            let competes = [GateKind::Swipe, GateKind::Topology, GateKind::ExpertChoice, GateKind::Sinkhorn];
            let grouped = moe.capacity_factor.is_some() || competes.contains(&moe.gate);
            (!grouped).then_some("without a capacity, tokens of this gate do not compete")
        },
    },
];

/// Gates and policies that move nothing, and why.
pub(super) const IDLE: &[Unused] = &[
    Unused {
        key: "moe.gate",
        reads: &["moe.gate", "moe.logical_workers", "moe.logical_nodes", "moe.capacity_factor"],
        because: idle_gate,
    },
    Unused {
        key: "moe.overflow",
        reads: &["moe.overflow", "moe.logical_nodes", "moe.capacity_factor"],
        because: |config| {
            let moe = config.moe.as_ref()?;
            let idle = moe.overflow == Overflow::Node && moe.logical_nodes == 1 && moe.capacity_factor.is_some();
            idle.then_some(
                "moe.logical_nodes is 1, so that every expert is on the node of the full one, as with \"reroute\"; set \
                 it to 2 or more, a divisor of moe.experts",
            )
        },
    },
    Unused {
        key: "moe.group_tokens",
        reads: &["moe.group_tokens", "train.micro_batch", "train.batch_tokens", "model.seq"],
        because: |config| {
            let rows = config.train.micro_batch.unwrap_or_else(|| config.rows_per_step());
            let beyond = config.moe.as_ref()?.group_tokens? > rows * config.model.seq;
            beyond
                .then_some("a micro-batch (train.micro_batch) has fewer tokens, and all of them are one group as it is")
        },
    },
];

fn idle_gate(config: &Config) -> Option<&'static str> {
    let moe = config.moe.as_ref()?;
    match moe.gate {
        GateKind::Swipe if moe.logical_workers == 1 => Some(
            "moe.logical_workers is 1, and one worker has nobody to share with; set it to 2 or more, a divisor of \
             moe.experts",
        ),
        GateKind::DistributedCapacity if moe.capacity_factor.is_none() => {
            Some("without moe.capacity_factor there are no places to distribute; set it, for example to 1.25")
        }
        GateKind::DistributedCapacity if moe.logical_workers == 1 => Some(
            "moe.logical_workers is 1, so that each expert has places for all tokens of a group; set it to 2 or more, \
             a divisor of moe.experts",
        ),
        GateKind::Topology if moe.logical_nodes == 1 => Some(
            "moe.logical_nodes is 1, and nothing leaves the only node; set it to 2 or more, a divisor of moe.experts",
        ),
        _ => None,
    }
}

fn only_sigmoid(config: &Config) -> Option<&'static str> {
    (config.moe.as_ref()?.gate != GateKind::Sigmoid).then_some("only moe.gate = \"sigmoid\" reads it")
}

fn gate_has_its_top_k(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref()?;
    let only = moe.gate.only_top_k().filter(|only| *only != moe.top_k)?;
    let wrong = format!("moe.gate = {:?} is defined for {only} alone", moe.gate.name());
    Some(Finding::new(wrong, format!("the nearest valid value is {only}")))
}

fn causal_models_do_not_look_ahead(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|moe| moe.gate.looks_ahead() && config.model.is_causal())?;
    let wrong =
        format!("{:?} lets later tokens decide about earlier ones, which a causal model must not see", moe.gate.name());
    Some(Finding::new(wrong, "choose another gate, for example \"softmax\""))
}

fn divides(what: &str, number: usize, experts: usize) -> Option<Finding> {
    if number > 0 && experts.is_multiple_of(number) {
        return None;
    }
    let wrong = format!("{what} have equal shares of the experts, but it does not divide moe.experts = {experts}");
    Some(Finding::new(wrong, nearest_of(number, &divisors(experts))))
}

fn workers_divide(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref()?;
    divides("workers", moe.logical_workers, moe.experts)
}

fn nodes_divide(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref()?;
    divides("nodes", moe.logical_nodes, moe.experts)
}

fn groups_divide(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref()?;
    divides("groups", moe.groups, moe.experts)
}

fn groups_hold_the_choices(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|moe| moe.gate == GateKind::Sigmoid)?;
    let size = moe.experts / moe.groups.max(1);
    let least = moe.top_k.div_ceil(size.max(1)).min(moe.groups);
    // Megatron scores a group by k / top_groups of its experts.
    let shared = moe.dialect == Some(Dialect::Megatron) && moe.groups > 1;
    let valid: Vec<usize> = (least..=moe.groups).filter(|n| !shared || moe.top_k.is_multiple_of(*n)).collect();
    if valid.contains(&moe.top_groups) {
        return None;
    }
    let mut wrong =
        format!("of {} groups of {size} experts, from which moe.top_k = {} are chosen", moe.groups, moe.top_k);
    if shared {
        wrong += ", as many in each with moe.dialect = \"megatron\"";
    }
    if valid.is_empty() {
        return Some(Finding::new(wrong, "leave moe.dialect out, or change moe.top_k or moe.groups"));
    }
    Some(Finding::new(wrong, nearest_of(moe.top_groups, &valid)))
}

fn balance_has_its_loads(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref()?;
    if moe.joins_layers() && moe.scope() != BalanceScope::MicroBatch {
        let wrong = "moe.dialect = \"hf\" compares the loads of a micro-batch, of all layers together";
        return Some(Finding::new(wrong, "leave it out, or choose \"micro_batch\" or another moe.dialect"));
    }
    let wrong = (moe.gate == GateKind::Noisy && moe.scope() == BalanceScope::GlobalBatch)
        .then_some("the losses of moe.gate = \"noisy\" are not made of the loads of the step before")?;
    Some(Finding::new(wrong, "choose \"sequence\" or \"micro_batch\""))
}

fn recordings_are_two_files(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|moe| moe.record.is_some() && moe.record == moe.replay)?;
    let wrong = format!("the same file as moe.replay, {}", moe.replay.as_deref()?.display());
    Some(Finding::new(wrong, "a recording cannot be followed and written at once: choose another file"))
}

fn one_network_beside(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|moe| moe.residual && moe.shared_experts > 0)?;
    let wrong = format!("every token passes through moe.shared_experts = {} already", moe.shared_experts);
    Some(Finding::new(wrong, "leave one of the two out"))
}

fn widths_add_up(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|moe| moe.equal_compute)?;
    let (d_ff, d_expert, top_k) = (config.model.d_ff?, moe.d_expert?, moe.top_k);
    if !d_ff.is_multiple_of(top_k) {
        let valid: Vec<usize> = divisors(d_ff).into_iter().filter(|k| *k <= moe.experts).collect();
        let wrong = format!("moe.top_k = {top_k} does not divide model.d_ff = {d_ff}");
        return Some(Finding::new(wrong, format!("of moe.top_k, {}", nearest_of(top_k, &valid))));
    }
    let wrong = format!("moe.d_expert = {d_expert} is not model.d_ff / moe.top_k = {}", d_ff / top_k);
    (d_expert != d_ff / top_k).then(|| Finding::new(wrong, "leave one of the two out"))
}
