//! What the `moe.condense` keys may say together, and which of them nothing reads.

use super::Config;
use super::rules::{Rule, Unused, conflict};
use crate::limits::{Finding, divisors, nearest_of};
use crate::moe;
use crate::parallel::Migrate;

pub(super) const RULES: &[Rule] = &[
    Rule { key: "moe.condense", reads: &["moe.condense", "moe.gate"], check: gate_decides_by_the_row },
    Rule {
        key: "moe.condense_tokens",
        reads: &[
            "moe.condense",
            "moe.condense_tokens",
            "model.seq",
            "model.source_seq",
            "train.micro_batch",
            "train.batch_tokens",
            "parallel.ranks",
            "parallel.tensor",
        ],
        check: groups_lie_on_one_rank,
    },
    Rule {
        key: "parallel.sequence",
        reads: &["moe.condense", "parallel.sequence", "parallel.tensor"],
        check: tokens_are_compared_where_they_lie,
    },
    Rule { key: "moe.condense_history", reads: &["moe.condense", "moe.condense_history"], check: bounds_are_in_order },
    Rule {
        key: "moe.condense_history",
        reads: &["moe.condense", "moe.condense_history", "parallel.migrate"],
        check: history_stays_with_its_sequence,
    },
    Rule { key: "moe.condense_range", reads: &["moe.condense", "moe.condense_range"], check: range_has_two_ends },
];

pub(super) const UNUSED: &[Unused] = &[
    unused_if_off("moe.condense_gradient"),
    unused_if_off("moe.condense_tokens"),
    unused_if_off("moe.condense_clusters"),
    unused_if_off("moe.condense_compared"),
    unused_if_off("moe.condense_history"),
    Unused {
        key: "moe.condense_threshold",
        reads: &["moe.condense"],
        because: |config| {
            let fixed = config.moe.as_ref()?.has_fixed_threshold();
            (!fixed).then_some("only moe.condense = \"static\" has a threshold of its own")
        },
    },
    unused_if_not_adaptive("moe.condense_range"),
    unused_if_not_adaptive("moe.condense_slope"),
    unused_if_not_adaptive("moe.condense_warmup"),
    Unused {
        key: "moe.condense_range",
        reads: &["moe.condense", "moe.condense_range"],
        because: |config| {
            let adaptive = condensing(config).filter(|moe| moe.has_adaptive_threshold())?;
            let above = adaptive.condense_range.iter().all(|end| *end > 1.0);
            above.then_some("above 1 nothing is similar enough to be condensed")
        },
    },
    Unused {
        key: "moe.condense_warmup",
        reads: &["moe.condense", "moe.condense_warmup", "train.steps"],
        because: |config| {
            let adaptive = condensing(config).filter(|moe| moe.has_adaptive_threshold())?;
            let never = adaptive.condense_warmup >= config.train.steps;
            never.then_some("train.steps are no more: the threshold never leaves the start of moe.condense_range")
        },
    },
];

const fn unused_if_off(key: &'static str) -> Unused {
    Unused {
        key,
        reads: &["moe.condense"],
        because: |config| condensing(config).is_none().then_some("moe.condense = \"off\" condenses nothing"),
    }
}

const fn unused_if_not_adaptive(key: &'static str) -> Unused {
    Unused {
        key,
        reads: &["moe.condense"],
        because: |config| {
            let adaptive = config.moe.as_ref()?.has_adaptive_threshold();
            (!adaptive).then_some("only moe.condense = \"adaptive\" follows the loss between two thresholds")
        },
    }
}

pub(super) const REMARK_READS: &[&str] =
    &["moe.condense", "moe.condense_clusters", "moe.layers", "model.family", "model.layers"];

/// What a causal model is told in which later tokens may represent earlier ones.
pub(super) fn remark(config: &Config) -> Option<String> {
    let moe = condensing(config).filter(|moe| config.model.has_causal_experts(moe))?;
    moe.looks_ahead().then(|| {
        "moe.condense_clusters = \"star\" lets later tokens of a causal model represent earlier ones: training sees a \
         part of what it is to predict, and held-out losses may be worse than training promises"
            .to_owned()
    })
}

/// The section, if it asks for condensation.
fn condensing(config: &Config) -> Option<&moe::Config> {
    config.moe.as_ref().filter(|moe| moe.condenses())
}

fn gate_decides_by_the_row(config: &Config) -> Option<Finding> {
    let moe = condensing(config)?;
    let because = moe.rows_are_not_alike()?;
    let wrong = format!("with moe.gate = {:?} {because}", moe.gate.kind().name());
    conflict(wrong, "choose another gate, for example \"softmax\" (a moe.capacity_factor is possible), or \"off\"")
}

fn groups_lie_on_one_rank(config: &Config) -> Option<Finding> {
    let tokens = condensing(config)?.condense_tokens?;
    config.model.row_lengths().into_iter().find_map(|seq| groups_lie_in_rows(config, tokens, seq))
}

fn groups_lie_in_rows(config: &Config, tokens: usize, seq: usize) -> Option<Finding> {
    if seq.is_multiple_of(tokens) {
        return None;
    }
    let rows = config.train.micro_batch.unwrap_or_else(|| config.rows_per_step());
    let hosts = (config.parallel.ranks / config.parallel.tensor).max(1);
    // Of each host's rows in a micro-batch, a group takes whole ones.
    let whole = if rows.is_multiple_of(hosts) { divisors(rows / hosts) } else { vec![1] };
    if tokens.is_multiple_of(seq) && whole.contains(&(tokens / seq)) {
        return None;
    }
    let mut valid = divisors(seq);
    valid.extend(whole.into_iter().map(|rows| rows * seq));
    let wrong = format!(
        "neither divides the {seq} tokens of a row nor is a number of sequences that divides those of every rank in a \
         micro-batch: a group of tokens must lie on one rank"
    );
    conflict(wrong, nearest_of(tokens, &valid))
}

fn tokens_are_compared_where_they_lie(config: &Config) -> Option<Finding> {
    condensing(config).filter(|_| config.parallel.sequence && config.parallel.tensor > 1)?;
    let wrong = "with moe.condense tokens are compared that this would spread over the ranks of parallel.tensor: to \
                 gather them in every layer would send more than shared rows save";
    conflict(wrong, "set it to false: moe.drop_duplicates divides the rows among the ranks all the same")
}

fn bounds_are_in_order(config: &Config) -> Option<Finding> {
    const USUAL: &str = "the paper observes with [0.8, 0.2]";
    match condensing(config)?.condense_history.as_deref()? {
        [same, different] if same > different => None,
        [same, different] => conflict(format!("S1 = {same} is not above S2 = {different}"), USUAL),
        other => conflict(format!("{} numbers, not two", other.len()), USUAL),
    }
}

fn history_stays_with_its_sequence(config: &Config) -> Option<Finding> {
    condensing(config)?.condense_history.as_ref()?;
    (config.parallel.migrate != Migrate::Off).then(|| {
        let wrong = "similarities of the layer before stay on the rank that compared the tokens, and \
                     parallel.migrate moves sequences to other ranks: what is condensed would depend on where they are";
        Finding::new(wrong, "leave it out, or set parallel.migrate to \"off\"")
    })
}

fn range_has_two_ends(config: &Config) -> Option<Finding> {
    match condensing(config)?.condense_range[..] {
        [_, _] => None,
        ref other => conflict(format!("{} numbers, not two", other.len()), "write the first and the last threshold"),
    }
}
