//! What `[moe]` may say about gates and experts: keys that must agree, and keys that nothing reads.

use toml::Value;

use super::Config;
use super::rules::{Rule, Unused};
use super::source::{RecipeSource, join};
use crate::limits::{Bounds, Finding, divisors, nearest_of};
use crate::moe;
use crate::moe::{BalanceScope, Overflow};

pub(super) const RULES: &[Rule] = &[
    Rule { key: "moe.top_k", reads: &["moe.top_k", "moe.gate"], check: gate_has_its_top_k },
    Rule {
        key: "moe.gate",
        reads: &[
            "moe.gate",
            "model.family",
            "moe.layers",
            "model.layers",
            "model.encoder_layers",
            "model.decoder_layers",
        ],
        check: causal_stacks_do_not_look_ahead,
    },
    Rule { key: "moe.gate", reads: &["moe.gate", "model.family"], check: pairs_of_rows_are_padded },
    Rule { key: "moe.jitter", reads: &["moe.jitter", "moe.gate"], check: one_kind_of_noise },
    Rule { key: "moe.logical_nodes", reads: &["moe.logical_nodes", "moe.experts"], check: nodes_divide },
    Rule { key: "moe.record", reads: &["moe.record", "moe.replay"], check: recordings_are_two_files },
    Rule {
        key: "model.source_seq",
        reads: &["model.source_seq", "model.seq", "model.family", "moe.record", "moe.replay"],
        check: recordings_have_rows_of_one_length,
    },
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
    Rule {
        key: "moe.dialect",
        reads: &["moe.dialect", "moe.gate", "moe.experts"],
        check: joined_layers_have_the_same_experts,
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
        key: "moe.eval_capacity_factor",
        reads: &["moe.capacity_factor", "moe.gate"],
        because: |config| {
            // Experts that choose among tokens take an even share each where nothing else is said.
            let moe = config.moe.as_ref().filter(|moe| moe.chosen_per_token().is_none())?;
            moe.capacity_factor.is_none().then_some("without moe.capacity_factor nothing is dropped in training either")
        },
    },
    Unused {
        key: "moe.dialect",
        reads: &["moe.gate"],
        because: |config| {
            let moe = config.moe.as_ref()?;
            moe.spoken().is_none().then_some("moe.gate has weights of its own, and losses, whatever the dialect")
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
    Unused {
        key: "moe.logical_nodes",
        reads: &["moe.gate", "moe.overflow", "moe.capacity_factor"],
        because: |config| {
            let moe = config.moe.as_ref()?;
            (!moe.reads_nodes()).then_some("neither the gate (moe.gate) nor moe.overflow knows nodes")
        },
    },
    Unused {
        key: "moe.group_tokens",
        reads: &["moe.gate", "moe.capacity_factor"],
        because: |config| {
            let moe = config.moe.as_ref()?;
            let grouped = moe.capacity_factor.is_some() || moe.gate_competes();
            (!grouped).then_some("without a capacity, tokens of this gate do not compete")
        },
    },
];

/// Gates and policies that move nothing, and why.
pub(super) const IDLE: &[Unused] = &[
    Unused {
        key: "moe.gate",
        reads: &["moe.gate", "moe.logical_nodes", "moe.capacity_factor"],
        because: |config| config.moe.as_ref()?.idle_gate(),
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
        reads: &["moe.group_tokens", "train.micro_batch", "train.batch_tokens", "model.seq", "model.source_seq"],
        because: |config| {
            let rows = config.train.micro_batch.unwrap_or_else(|| config.rows_per_step());
            let beyond = config.moe.as_ref()?.group_tokens? > rows * config.model.longest_row();
            beyond
                .then_some("a micro-batch (train.micro_batch) has fewer tokens, and all of them are one group as it is")
        },
    },
];

/// The ranges of the numbers that the gate of a recipe has.
pub(super) fn bounds(source: &RecipeSource) -> Vec<(String, Bounds)> {
    let kind = source.value("moe.gate.kind").and_then(Value::as_str).unwrap_or_default();
    moe::Config::keys_of_gate(kind).iter().map(|(key, range)| (join("moe.gate", key), *range)).collect()
}

/// What the misfits of a gate's own keys depend on.
pub(super) const MISFITS_READ: &[&str] = &["moe.gate", "moe.experts", "moe.top_k", "moe.dialect"];

/// The keys of the gate that do not fit the section.
pub(super) fn misfits(config: &Config) -> Vec<(String, Finding)> {
    let misfits = config.moe.as_ref().map_or_else(Vec::new, |moe| moe.gate_misfits());
    misfits.into_iter().map(|(key, finding)| (join("moe.gate", key), finding)).collect()
}

pub(super) const REMARK_READS: &[&str] = &[
    "moe.gate",
    "moe.logical_nodes",
    "model.family",
    "moe.layers",
    "model.layers",
    "model.encoder_layers",
    "model.decoder_layers",
];

/// What a causal model is told of a gate that looks ahead in part. Such gates are in use, and what they learn from it is
/// little; but held-out losses and texts may be worse than training promises.
pub(super) fn remark(config: &Config) -> Option<String> {
    let moe = config.moe.as_ref().filter(|moe| config.model.has_causal_experts(moe))?;
    let how = moe.bends_causality()?;
    let name = moe.gate.kind().name();
    Some(format!("moe.gate = {name:?} lets later tokens of a causal model decide about earlier ones: {how}"))
}

fn gate_has_its_top_k(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref()?;
    let only = moe.gate.keys().only_top_k().filter(|only| *only != moe.top_k)?;
    let wrong = format!("moe.gate = {:?} is defined for {only} alone", moe.gate.kind().name());
    Some(Finding::new(wrong, format!("the nearest valid value is {only}")))
}

fn causal_stacks_do_not_look_ahead(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|moe| config.model.has_causal_experts(moe))?;
    let (name, how) = (moe.gate.kind().name(), moe.breaks_causality()?);
    let wrong =
        format!("{name:?} lets later tokens decide about earlier ones, which a causal model must not see: {how}");
    let layers =
        config.model.stack_layers().map(|[encoder, _]| (0..encoder).filter(|&layer| moe.layers.contains(layer)));
    let alone = layers.map(Iterator::collect::<Vec<usize>>).filter(|layers| !layers.is_empty());
    let alone = alone.map(|layers| format!(", or experts in the encoder alone (moe.layers = {{ list = {layers:?} }})"));
    let remedy = format!("choose another gate, for example \"softmax\"{}", alone.unwrap_or_default());
    Some(Finding::new(wrong, remedy))
}

/// Texts in pairs do not fill both rows.
fn pairs_of_rows_are_padded(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|moe| config.model.stack_layers().is_some() && !moe.skips_padding())?;
    let wrong = format!(
        "{:?} compares tokens with each other, and would count the padding at the ends of rows of pairs",
        moe.gate.kind().name()
    );
    Some(Finding::new(wrong, "choose another gate, for example \"softmax\""))
}

fn one_kind_of_noise(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|moe| moe.jitter.is_some())?;
    moe.has_own_noise().then(|| {
        let wrong = format!("moe.gate = {:?} has noise of its own", moe.gate.kind().name());
        Finding::new(wrong, "leave it out, or choose another gate")
    })
}

fn nodes_divide(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref()?;
    moe.equal_shares("nodes", moe.logical_nodes)
}

fn balance_has_its_loads(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref()?;
    if moe.joins_layers() && moe.scope() != BalanceScope::MicroBatch {
        let wrong = "moe.dialect = \"hf\" compares the loads of a micro-batch, of all layers together";
        return Some(Finding::new(wrong, "leave it out, or choose \"micro_batch\" or another moe.dialect"));
    }
    let wrong = (moe.has_own_losses() && moe.scope() == BalanceScope::GlobalBatch)
        .then(|| format!("the losses of moe.gate = {:?} are not made of loads of a step", moe.gate.kind().name()))?;
    Some(Finding::new(wrong, "choose \"sequence\" or \"micro_batch\""))
}

/// The loss of `hf` counts the routes of an expert number over all layers.
fn joined_layers_have_the_same_experts(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|moe| moe.joins_layers() && moe.experts.list().is_some())?;
    let wrong = format!(
        "one balance loss adds up the loads of all layers, expert by expert, and moe.experts = {} gives layers different \
         numbers of them",
        moe.experts
    );
    Some(Finding::new(wrong, "choose \"megatron\", which weighs the chosen alike and has a loss for each layer"))
}

fn recordings_are_two_files(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|moe| moe.record.is_some() && moe.record == moe.replay)?;
    let wrong = format!("the same file as moe.replay, {}", moe.replay.as_deref()?.display());
    Some(Finding::new(wrong, "a recording cannot be followed and written at once: choose another file"))
}

/// The header of a recording has one length of rows.
fn recordings_have_rows_of_one_length(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|moe| moe.record.is_some() || moe.replay.is_some())?;
    let key = if moe.record.is_some() { "moe.record" } else { "moe.replay" };
    let differ = config.model.row_lengths().iter().any(|&length| length != config.model.seq);
    differ.then(|| {
        let wrong = format!("{key} needs rows of one length, and model.seq = {}", config.model.seq);
        Finding::new(wrong, format!("make both lengths the same, or leave {key} out"))
    })
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
        let valid: Vec<usize> = divisors(d_ff).into_iter().filter(|k| *k <= moe.experts.smallest()).collect();
        let wrong = format!("moe.top_k = {top_k} does not divide model.d_ff = {d_ff}");
        return Some(Finding::new(wrong, format!("of moe.top_k, {}", nearest_of(top_k, &valid))));
    }
    let wrong = format!("moe.d_expert = {d_expert} is not model.d_ff / moe.top_k = {}", d_ff / top_k);
    (d_expert != d_ff / top_k).then(|| Finding::new(wrong, "leave one of the two out"))
}

#[cfg(test)]
mod tests {
    use toml::Table;

    use super::*;
    use crate::config::load;

    /// What the rules of gates say of an encoder of two layers and a decoder of two with experts in these.
    fn told(gate: &str, layers: &[usize]) -> Vec<(&'static str, String)> {
        let recipe = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/quickstart.toml");
        let mut config = load(&recipe, &[], None).expect("a recipe of this repository").config;
        let model = &mut config.model;
        model.family = Value::from("m2m").try_into().expect("a family");
        (model.layers, model.encoder_layers) = (4, Some(2));
        let keys = Value::Table([(gate.to_owned(), Value::Table(Table::new()))].into_iter().collect());
        let moe = config.moe.as_mut().expect("a recipe with experts");
        (moe.gate, moe.layers) = (keys.try_into().expect("a gate"), moe::Layers::List(layers.to_vec()));
        let found = RULES.iter().filter(|rule| rule.key == "moe.gate").filter_map(|rule| (rule.check)(&config));
        found.map(|Finding { wrong, remedy }| ("moe.gate", format!("{wrong}; {remedy}"))).collect()
    }

    #[test]
    fn gates_that_look_ahead_are_for_encoders() {
        assert_eq!(told("expert_choice", &[0, 1]), []);
        assert_eq!(told("softmax", &[0, 1, 2, 3]), []);
        for layers in [&[2][..], &[0, 3], &[1, 2, 3]] {
            let found = told("expert_choice", layers);
            assert!(matches!(&found[..], [(_, text)] if text.contains("a causal model must not see")), "{found:?}");
            let encoder = layers.iter().any(|&layer| layer < 2);
            assert_eq!(
                found[0].1.contains("experts in the encoder alone (moe.layers = { list = ["),
                encoder,
                "{found:?}"
            );
        }
    }

    /// A gate whose experts choose has a factor without `moe.capacity_factor`, too: 1.
    #[test]
    fn a_factor_outside_training_is_idle_where_nothing_is_dropped_in_training() {
        let recipe = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/quickstart.toml");
        let mut config = load(&recipe, &[], None).expect("a recipe of this repository").config;
        let rule = UNUSED.iter().find(|rule| rule.key == "moe.eval_capacity_factor").expect("a rule");
        let mut idle = |gate: &str, factor| {
            let keys = Value::Table([(gate.to_owned(), Value::Table(Table::new()))].into_iter().collect());
            let moe = config.moe.as_mut().expect("a recipe with experts");
            (moe.gate, moe.capacity_factor) = (keys.try_into().expect("a gate"), factor);
            (rule.because)(&config).is_some()
        };
        assert!(idle("softmax", None) && !idle("softmax", Some(1.0)));
        assert!(!idle("expert_choice", None) && !idle("expert_choice", Some(1.0)));
    }

    #[test]
    fn gates_that_would_count_padding_are_refused_for_pairs() {
        for gate in ["sinkhorn", "swipe"] {
            let found = told(gate, &[0, 1]);
            assert!(matches!(&found[..], [(_, text)] if text.contains("the padding at the ends of rows")), "{found:?}");
        }
    }
}
