//! What `[model]` may say of families: keys that must agree, and keys that a family does not read.

use super::Config;
use super::rules::{Rule, Unused};
use crate::limits::{Finding, divisors, nearest_of};

pub(super) const RULES: &[Rule] = &[
    Rule { key: "model.heads", reads: &["model.heads", "model.d_model", "model.family"], check: heads_fit },
    Rule { key: "model.kv_heads", reads: &["model.kv_heads", "model.heads", "model.family"], check: kv_heads_fit },
    Rule { key: "model.d_model", reads: &["model.d_model", "model.family"], check: waves_fit },
    Rule { key: "model.segment", reads: &["model.segment", "model.seq", "model.family"], check: segments_fit },
    Rule {
        key: "model.memory",
        reads: &["model.memory", "model.segment", "model.seq", "model.family"],
        check: memory_fits,
    },
];

pub(super) const UNUSED: &[Unused] = &[
    Unused {
        key: "model.rope_theta",
        reads: &["model.family"],
        because: |config| {
            let rotary = config.model.blueprint().is_rotary();
            (!rotary).then_some("model.family does not rotate queries and keys, as \"mixtral\" and \"llama\" do")
        },
    },
    Unused {
        key: "model.encoder_layers",
        reads: &["model.family"],
        because: |config| {
            let alone = !config.model.blueprint().reads_a_source();
            alone.then_some("model.family has one stack of layers")
        },
    },
    Unused { key: "model.segment", reads: &["model.family"], because: remembers_nothing },
    Unused { key: "model.memory", reads: &["model.family"], because: remembers_nothing },
    Unused {
        key: "data.mask_rate",
        reads: &["model.family"],
        because: |config| {
            let causal = config.model.is_causal();
            causal.then_some("only model.family = \"bert\" predicts masked tokens")
        },
    },
];

/// A family some of whose parts are not built yet.
pub(super) fn unbuilt(config: &Config) -> Option<Finding> {
    let blueprint = config.model.blueprint();
    let rows = blueprint.reads_a_source().then_some("rows of a source and a target text to train on");
    let missing: Vec<&str> = blueprint.missing().into_iter().chain(rows).collect();
    if missing.is_empty() {
        return None;
    }
    let wrong = format!("not built yet: {}", missing.join(", "));
    Some(Finding::new(wrong, format!("built are {}", config.model.trainable_families().join(", "))))
}

fn remembers_nothing(config: &Config) -> Option<&'static str> {
    let remembers = config.model.blueprint().is_segmented();
    (!remembers).then_some("only model.family = \"transformer_xl\" reads rows in segments")
}

fn heads_fit(config: &Config) -> Option<Finding> {
    let (heads, width, blueprint) = (config.model.heads, config.model.d_model, config.model.blueprint());
    if blueprint.heads().is_none_or(|heads| heads.own_dim) {
        return None;
    }
    let rotary = blueprint.is_rotary();
    let fits = |heads: &usize| !rotary || (width / heads).is_multiple_of(2);
    let valid: Vec<usize> = divisors(width).into_iter().filter(fits).collect();
    if valid.contains(&heads) {
        return None;
    }
    if valid.is_empty() {
        let wrong = format!("rotary positions need an even width per head, model.d_model is {width}");
        return Some(Finding::new(wrong, format!("set model.d_model to {}", width + 1)));
    }
    let wrong = if width.is_multiple_of(heads) {
        let per_head = width / heads;
        format!("rotary positions need an even width per head, {width} / {heads} is {per_head}")
    } else {
        format!("does not divide model.d_model = {width}")
    };
    Some(Finding::new(wrong, nearest_of(heads, &valid)))
}

fn kv_heads_fit(config: &Config) -> Option<Finding> {
    let (heads, kv_heads) = (config.model.heads, config.model.kv_heads?);
    let may_group = config.model.blueprint().heads().is_some_and(|heads| heads.may_group);
    if !may_group && kv_heads != heads {
        let wrong = format!("{} has no grouped heads, model.heads is {heads}", config.model.family.name());
        return Some(Finding::new(wrong, "leave the key out, or choose model.family = \"mixtral\""));
    }
    if heads.is_multiple_of(kv_heads) {
        return None;
    }
    let wrong = format!("does not divide model.heads = {heads}");
    Some(Finding::new(wrong, nearest_of(kv_heads, &divisors(heads))))
}

fn waves_fit(config: &Config) -> Option<Finding> {
    let width = config.model.d_model;
    let relative = config.model.blueprint().is_segmented();
    (relative && !width.is_multiple_of(2)).then(|| {
        let wrong = "distances have as many sines as cosines, so the width must be even";
        Finding::new(wrong, nearest_of(width, &[width - 1, width + 1].map(|even| even.max(2))))
    })
}

fn segments_fit(config: &Config) -> Option<Finding> {
    let seq = config.model.seq;
    if !config.model.blueprint().is_segmented() {
        return None;
    }
    let Some(segment) = config.model.segment else {
        let remedy = format!("add segment to [model], a divisor of model.seq = {seq}");
        return Some(Finding::new("missing: model.family = \"transformer_xl\" reads rows in segments", remedy));
    };
    (!seq.is_multiple_of(segment))
        .then(|| Finding::new(format!("does not divide model.seq = {seq}"), nearest_of(segment, &divisors(seq))))
}

fn memory_fits(config: &Config) -> Option<Finding> {
    let segment = config.model.segment.filter(|_| config.model.blueprint().is_segmented())?;
    let most = config.model.seq.saturating_sub(segment);
    let Some(memory) = config.model.memory else {
        let remedy = format!("add memory to [model]: 0 to {most} tokens");
        return Some(Finding::new("missing: model.family = \"transformer_xl\" remembers earlier tokens", remedy));
    };
    (memory > most).then(|| {
        let wrong = format!("before the last segment of a row of {} tokens there are {most}", config.model.seq);
        Finding::new(wrong, format!("the nearest valid value is {most}"))
    })
}
