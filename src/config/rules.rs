//! What the keys of a recipe may be together, as tables: `RULES` for keys that must agree with each other,
//! `UNUSED` for keys that other keys switch off. Those of gates and of families have files of their own.
//!
//! A rule names the keys it reads, so that it stays silent while one of them is wrong by itself.

use super::Config;
use super::{LrSchedule, StorageType};
use crate::limits::{Finding, common_divisor, divisors, nearest_of};
use crate::moe;
use crate::moe::{Layers, ScheduleKind, Shadowing};

/// Keys that must agree.
pub(super) struct Rule {
    /// The key to blame.
    pub(super) key: &'static str,
    pub(super) reads: &'static [&'static str],
    pub(super) check: fn(&Config) -> Option<Finding>,
}

pub(super) const RULES: &[Rule] = &[
    Rule { key: "model.vocab", reads: &["model.vocab", "data.tokenizer"], check: vocab_holds_bytes },
    Rule { key: "train.batch_tokens", reads: &["train.batch_tokens", "model.seq"], check: batch_is_whole_rows },
    Rule {
        key: "train.micro_batch",
        reads: &["train.micro_batch", "train.batch_tokens", "model.seq"],
        check: micro_batch_fits,
    },
    Rule { key: "train.eval_every", reads: &["train.eval_every", "data.held_out"], check: evaluation_has_data },
    Rule { key: "data.sources", reads: &["data", "model.family"], check: there_is_data },
    Rule {
        key: "moe.schedule_groups",
        reads: &["moe.schedule_groups", "parallel.expert"],
        check: schedule_groups_divide,
    },
    Rule { key: "moe.shadowing", reads: &["moe.shadowing", "moe.experts"], check: shadowing_is_possible },
    Rule { key: "moe.top_k", reads: &["moe.top_k", "moe.experts"], check: top_k_fits },
    Rule {
        key: "moe.experts",
        reads: &["moe.experts", "moe.layers", "model.layers"],
        check: every_layer_has_a_number_of_experts,
    },
    Rule { key: "moe.layers", reads: &["moe.layers", "model.layers"], check: moe_layers_exist },
];

pub(super) fn conflict(wrong: impl Into<String>, remedy: impl Into<String>) -> Option<Finding> {
    Some(Finding::new(wrong, remedy))
}

fn vocab_holds_bytes(config: &Config) -> Option<Finding> {
    // Every byte has a token, so that any text can be written down, and so have the end of a text and the mask.
    const LEAST: usize = 256 + 2;
    if !config.data.trains_tokenizer() || config.model.vocab >= LEAST {
        return None;
    }
    let wrong = "too small for data.tokenizer = \"bpe\": 256 bytes, the end of a text and the mask";
    conflict(wrong, format!("the nearest valid value is {LEAST}"))
}

fn batch_is_whole_rows(config: &Config) -> Option<Finding> {
    let (tokens, seq) = (config.train.batch_tokens, config.model.seq);
    if tokens.is_multiple_of(seq) {
        return None;
    }
    let below = tokens / seq * seq;
    let valid: Vec<usize> = [below, below + seq].into_iter().filter(|tokens| *tokens > 0).collect();
    conflict(format!("not a multiple of model.seq = {seq}"), nearest_of(tokens, &valid))
}

fn micro_batch_fits(config: &Config) -> Option<Finding> {
    let (micro_batch, rows) = (config.train.micro_batch?, config.rows_per_step());
    // A batch that is no whole number of rows is its own problem.
    if rows * config.model.seq != config.train.batch_tokens || rows.is_multiple_of(micro_batch) {
        return None;
    }
    let wrong = format!("does not divide the {rows} rows of a step (train.batch_tokens / model.seq)");
    conflict(wrong, nearest_of(micro_batch, &divisors(rows)))
}

fn evaluation_has_data(config: &Config) -> Option<Finding> {
    if config.train.eval_every == 0 || config.data.held_out > 0.0 || config.data.names_held_out() {
        return None;
    }
    let wrong = "nothing to evaluate on, data.held_out is 0";
    conflict(wrong, "hold text out (data.held_out = 0.01), or set train.eval_every to 0 for never")
}

fn there_is_data(config: &Config) -> Option<Finding> {
    // A model that reads one text and writes another is asked for its tasks instead.
    let sources = !config.model.blueprint().reads_a_source() && config.data.tasks.is_empty();
    let none = sources && config.data.sources.is_empty();
    none.then(|| {
        Finding::new("names no text to train on", "name a file, a folder or a glob, for example [\"corpus/*.txt\"]")
    })
}

fn schedule_groups_divide(config: &Config) -> Option<Finding> {
    let (moe, degrees) = (config.moe.as_ref()?, config.parallel.expert.distinct());
    let (groups, expert) = (moe.schedule_groups?, degrees.iter().find(|expert| !moe.schedules(**expert))?);
    let wrong = format!("does not cut the {expert} ranks of an expert group (parallel.expert) into equal groups");
    let all = degrees.iter().copied().fold(0, common_divisor);
    conflict(wrong, nearest_of(groups, &divisors(all)))
}

fn shadowing_is_possible(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref()?;
    match Shadowing::parse(&moe.shadowing) {
        None => conflict("not a way to shadow", "valid values: off, auto, and force:N for the N hottest experts"),
        Some(Shadowing::Force(n)) if moe.experts.distinct().first().is_some_and(|fewest| n > *fewest) => {
            conflict(more_than_experts(moe), format!("the nearest valid value is force:{}", moe.experts.smallest()))
        }
        Some(_) => None,
    }
}

fn top_k_fits(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref()?;
    let fewest = *moe.experts.distinct().first()?;
    (moe.top_k > fewest).then(|| Finding::new(more_than_experts(moe), format!("the nearest valid value is {fewest}")))
}

/// What is wrong with a number of experts that some layer does not have.
fn more_than_experts(moe: &moe::Config) -> String {
    match moe.experts.list() {
        None => format!("more than moe.experts = {}", moe.experts),
        Some(_) => {
            format!("more than the {} experts of a layer, moe.experts = {}", moe.experts.smallest(), moe.experts)
        }
    }
}

fn every_layer_has_a_number_of_experts(config: &Config) -> Option<Finding> {
    list_fits(config, config.moe.as_ref()?.experts.list()?)
}

/// What is wrong with a list of numbers of layers with experts, if it is of other layers.
pub(super) fn list_fits(config: &Config, list: &[usize]) -> Option<Finding> {
    let moe = config.moe.as_ref()?;
    let layers = (0..config.model.layers).filter(|layer| moe.layers.contains(*layer)).count();
    if list.len() == layers {
        return None;
    }
    let have = if layers == 1 { "layer has" } else { "layers have" };
    let wrong = format!("a list of {}, but {layers} {have} experts (moe.layers)", list.len());
    conflict(wrong, "give one for each of them in their order, or one number for all")
}

fn moe_layers_exist(config: &Config) -> Option<Finding> {
    let layers = config.model.layers;
    let missing: Vec<String> = match &config.moe.as_ref()?.layers {
        Layers::All => return None,
        Layers::Every(0) => {
            return conflict("every 0th layer does not exist", "every = 1 means all layers");
        }
        Layers::Every(every) if *every > layers => {
            let wrong = format!("selects no layer, model.layers is {layers}");
            return conflict(wrong, format!("the nearest valid value is {{ every = {layers} }}"));
        }
        Layers::Every(_) => return None,
        Layers::List(list) if list.is_empty() => {
            let remedy = format!("list layers from 0 to {}, or leave [moe] out", layers - 1);
            return conflict("selects no layer", remedy);
        }
        Layers::List(list) => list.iter().filter(|index| **index >= layers).map(ToString::to_string).collect(),
    };
    (!missing.is_empty()).then(|| {
        Finding::new(
            format!("layer {} is beyond model.layers = {layers}", missing.join(", ")),
            format!("layers count from 0, the last one is {}", layers - 1),
        )
    })
}

/// Keys that other keys switch off, and why; nothing if the key is in use.
pub(super) struct Unused {
    pub(super) key: &'static str,
    pub(super) reads: &'static [&'static str],
    pub(super) because: fn(&Config) -> Option<&'static str>,
}

pub(super) const UNUSED: &[Unused] = &[
    Unused {
        key: "train.lr_end",
        reads: &["train.schedule"],
        because: |config| match config.train.schedule {
            LrSchedule::Constant => Some("train.schedule = \"constant\" has no end"),
            LrSchedule::InverseSqrt => Some("train.schedule = \"inverse_sqrt\" has no end"),
            LrSchedule::Linear | LrSchedule::Cosine => None,
        },
    },
    Unused {
        key: "train.gradient_dtype",
        reads: &["train.dtype"],
        because: |config| {
            let wide = config.train.dtype == StorageType::F32;
            wide.then_some("train.dtype = \"f32\" has f32 gradients")
        },
    },
    Unused {
        key: "train.checkpoint_async",
        reads: &["train.checkpoint_every", "train.steps"],
        because: |config| {
            let alone = !config.train.writes_beside_steps();
            alone.then_some("the only checkpoint is the one at the end, and no step comes after it")
        },
    },
    Unused {
        key: "train.eval_rows",
        reads: &["train.eval_every"],
        because: |config| {
            let never = config.train.eval_every == 0;
            never.then_some("train.eval_every = 0 means no evaluations")
        },
    },
    Unused {
        key: "moe.schedule_groups",
        reads: &["moe.schedule"],
        because: |config| {
            let plain = config.moe.as_ref()?.schedule == ScheduleKind::Plain;
            plain.then_some("moe.schedule = \"plain\" has one step")
        },
    },
    Unused {
        key: "model.d_ff",
        reads: &["moe.layers", "moe.d_expert", "moe.equal_compute", "model.layers"],
        because: |config| {
            let moe = config.moe.as_ref()?;
            let all = (0..config.model.layers).all(|layer| moe.layers.contains(layer));
            let own_width = moe.d_expert != config.model.d_ff && !moe.equal_compute;
            (all && own_width).then_some("every layer is MoE and moe.d_expert is given")
        },
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{self, read};

    #[test]
    fn rules_speak_of_keys_that_exist() {
        let paths = read::paths::<Config>();
        let rules = config::RULES.iter().copied().flatten().flat_map(|rule| rule.reads.iter().chain([&rule.key]));
        let unused = config::UNUSED.iter().copied().flatten();
        let unused = unused.flat_map(|unused| unused.reads.iter().chain([&unused.key]));
        for key in rules.chain(unused) {
            assert!(paths.contains_key(*key), "{key}");
        }
    }
}
