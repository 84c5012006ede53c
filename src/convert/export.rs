//! Which family of Hugging Face's a recipe is of, if it is of one.

use serde_json::{Map, Value};

use super::Error;
use super::families::{self, ForeignFamily};
use super::folder::ModelFolder;
use super::foreign_config::{CONFIG, ForeignConfig};
use super::written_config::written;
use crate::config::{Config, unlike};
use crate::model::{self, Blueprint, Positions, RotaryScaling, Window};
use crate::moe::gates::{GateChoice, Perturbation};
use crate::moe::{self, Dialect, Weighting};

/// Keys of a recipe that say nothing of what a trained model computes: of training, and of how work is spread.
const OF_TRAINING: &[&str] = &[
    "model.init_std",
    "model.dropout",
    "model.source_seq",
    "moe.balance_weight",
    "moe.balance_scope",
    "moe.z_weight",
    "moe.jitter",
    "moe.gate.bias_rate",
    "moe.dead_after",
    "moe.pairs_every",
    "moe.schedule",
    "moe.schedule_groups",
    "moe.shadowing",
    "moe.drop_duplicates",
    "moe.record",
    "moe.replay",
    "moe.logical_nodes",
    "moe.equal_compute",
    "train.dtype",
];
/// Keys that are compared by what they come to.
const BY_EFFECT: &[&str] = &["model.family", "moe.dialect", "moe.layers"];

/// The family of a model, and its `config.json`.
///
/// # Errors
/// The nearest family with all that stands in its way, if there is none.
pub(super) fn family(model: &ModelFolder, dtype: &str) -> Result<(&'static ForeignFamily, Map<String, Value>), Error> {
    let config = stated(&model.config);
    let mut tried: Vec<(&ForeignFamily, Result<Map<String, Value>, Vec<String>>)> =
        families::ALL.iter().map(|family| (*family, fit(&config, family, dtype))).collect();
    // Built alike counts most, then whether there are experts; of two as near, the one that has the recipe's name.
    let far = |(family, fit): &(&ForeignFamily, Result<_, Vec<String>>)| {
        let named = family.family == config.model.family.name();
        let alike = built_as(&config, family) == config.model.blueprint();
        let problems = fit.as_ref().err().map_or(0, Vec::len);
        (problems > 0, !alike, family.layers.is_some() != config.moe.is_some(), problems, !named)
    };
    tried.sort_by_key(far);
    match tried.swap_remove(0) {
        (family, Ok(object)) => Ok((family, with_kept(object, model, family))),
        (family, Err(problems)) => {
            Err(Error::NoFamily { folder: model.folder.clone(), nearest: family.model_type, problems })
        }
    }
}

/// The same with the numbers that a family has where a recipe leaves them out: elsewhere others may be meant.
fn stated(config: &Config) -> Config {
    let (mut config, print) = (config.clone(), config.model.blueprint());
    let model = &mut config.model;
    if let Some(latent) = print.heads.latent {
        model.query_rank.get_or_insert(latent.query_rank.unwrap_or(0));
        model.kv_rank.get_or_insert(latent.kv_rank);
        model.content_dim.get_or_insert(latent.content_dim);
        model.rotary_dim.get_or_insert(latent.rotary_dim);
        model.value_dim.get_or_insert(latent.value_dim);
    } else if print.heads.own_dim {
        model.head_dim.get_or_insert(print.heads.head_dim);
    }
    if let Some([_, decoder]) = model.stack_layers() {
        model.decoder_layers.get_or_insert(decoder);
    }
    if let Window::Alternating { tokens } = print.window {
        model.window.get_or_insert(tokens);
    }
    if let Positions::Rotary {
        scaling: RotaryScaling::Yarn { factor, pretrained, .. } | RotaryScaling::Llama { factor, pretrained, .. },
        ..
    } = print.positions
    {
        model.rope_factor.get_or_insert(factor);
        model.rope_pretrained.get_or_insert(pretrained);
    }
    if let Some(moe) = &mut config.moe {
        let own = if let Perturbation::Jitter(own) = moe.perturbation() { own } else { 0.0 };
        moe.jitter.get_or_insert(own);
    }
    config
}

/// What a family makes of a recipe's sizes.
fn built_as(config: &Config, family: &ForeignFamily) -> Blueprint {
    let named = toml::Value::from(family.family).try_into().expect("the name of a family");
    model::Config { family: named, ..config.model.clone() }.blueprint()
}

/// The `config.json` of a family, if reading it gives the same model.
fn fit(config: &Config, family: &ForeignFamily, dtype: &str) -> Result<Map<String, Value>, Vec<String>> {
    let object = written(config, family, dtype).map_err(|problem| vec![problem])?;
    let read = ForeignConfig::of(object.clone(), CONFIG.into()).and_then(|file| file.recipe("f32", None));
    let (back, _) = read.map_err(|error| match error {
        Error::Inexpressible { problems, .. } => problems,
        other => vec![other.to_string()],
    })?;
    let problems = obstacles(config, &stated(&back));
    if problems.is_empty() { Ok(object) } else { Err(problems) }
}

/// All in which the model of a recipe differs from one of a family.
fn obstacles(own: &Config, theirs: &Config) -> Vec<String> {
    let (own_print, their_print) = (own.model.blueprint(), theirs.model.blueprint());
    let mut problems = Vec::new();
    if own_print != their_print {
        problems.push(format!("model.family = {:?} is built otherwise", own.model.family.name()));
    }
    let (Some(moe), Some(their_moe)) = (&own.moe, &theirs.moe) else {
        let experts = own.moe.as_ref().map(|moe| format!("moe.experts = {}: it is dense", moe.experts));
        problems.extend(experts);
        problems.extend((own.moe.is_none() && theirs.moe.is_some()).then(|| "there are no experts".to_owned()));
        return problems;
    };
    let weighting = |moe: &moe::Config| match moe.weighs() {
        // A softmax over the chosen is one over all divided by the sum over the chosen.
        Weighting::AmongChosen => Weighting::Normalised,
        other => other,
    };
    if weighting(moe) != weighting(their_moe) {
        problems.push(format!("moe.dialect = {:?} weighs experts otherwise", moe.dialect));
    }
    if moe.dialect == Some(Dialect::Megatron) && matches!(&moe.gate, GateChoice::Sigmoid(keys) if keys.groups > 1) {
        problems.push("moe.dialect = \"megatron\" scores groups of experts otherwise".to_owned());
    }
    let other = (0..own.model.layers).find(|&layer| moe.layers.contains(layer) != their_moe.layers.contains(layer));
    problems.extend(other.map(|layer| format!("moe.layers: layer {layer} is of the other kind")));
    let free = |key: &str| OF_TRAINING.contains(&key) || BY_EFFECT.contains(&key) || key.starts_with("moe.condense");
    // Where positions are distances, a model takes rows of any length.
    let of_any_length = matches!(own_print.positions, Positions::RelativeBias { .. });
    let is_as_long = |key: &str| key == "model.seq" && of_any_length && own.model.seq <= theirs.model.seq;
    // Where positions are not stretched, a factor of 1 and none are the same.
    let is_plain = |key: &str| key == "model.rope_factor" && !own_print.stretches_positions();
    let has_dense = (0..own.model.layers).any(|layer| !moe.layers.contains(layer));
    let differ = unlike(own, theirs)
        .into_iter()
        .filter(|[key, ..]| !free(key) && !is_as_long(key) && !is_plain(key) && (has_dense || key != "model.d_ff"));
    problems.extend(differ.map(|[key, is, was]| format!("{key} is {is}, there it is {was}")));
    problems
}

/// The same with what a file that came with the model says of other things, if it is of the family.
fn with_kept(mut object: Map<String, Value>, model: &ModelFolder, family: &ForeignFamily) -> Map<String, Value> {
    let kept = model.small(CONFIG).and_then(|text| serde_json::from_slice::<Map<String, Value>>(text).ok());
    let kept = kept.filter(|kept| kept.get("model_type").and_then(Value::as_str) == Some(family.model_type));
    let own = ["architectures", "model_type", "dtype", "torch_dtype"];
    for (name, value) in ForeignConfig::free(&kept.unwrap_or_default(), family) {
        if !own.contains(&name.as_str()) {
            object.insert(name, value);
        }
    }
    object
}
