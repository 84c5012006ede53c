//! What `[model]` may say of families: keys that must agree, and keys that a family does not read.

use toml::Value;

use super::Config;
use super::rules::{Rule, Unused};
use super::source::RecipeSource;
use crate::limits::{Finding, divisors, nearest_of};
use crate::model;

pub(super) const RULES: &[Rule] = &[
    Rule { key: "model.heads", reads: &["model.heads", "model.d_model", "model.family"], check: heads_fit },
    Rule { key: "model.kv_heads", reads: &["model.kv_heads", "model.heads", "model.family"], check: kv_heads_fit },
    Rule { key: "model.head_dim", reads: &["model.head_dim", "model.family"], check: own_heads_turn_in_pairs },
    Rule { key: "model.rotary_dim", reads: &["model.rotary_dim", "model.family"], check: parts_turn_in_pairs },
    Rule { key: "model.d_model", reads: &["model.d_model", "model.family"], check: waves_fit },
    Rule { key: "model.layers", reads: &["model.layers", "model.family"], check: both_stacks_have_layers },
    Rule {
        key: "model.encoder_layers",
        reads: &["model.encoder_layers", "model.layers", "model.family"],
        check: the_encoder_leaves_layers,
    },
    Rule {
        key: "model.decoder_layers",
        reads: &["model.decoder_layers", "model.encoder_layers", "model.layers", "model.family"],
        check: the_decoder_leaves_layers,
    },
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
        key: "model.head_dim",
        reads: &["model.family"],
        because: |config| {
            let heads = config.model.blueprint().heads;
            let (own, latent) = (heads.own_dim, heads.latent.is_some());
            let parts =
                latent.then_some("in model.family queries and keys have model.content_dim and model.rotary_dim");
            parts.or((!own).then_some("in model.family heads have model.d_model / model.heads each"))
        },
    },
    Unused { key: "model.query_rank", reads: &["model.family"], because: has_no_latents },
    Unused { key: "model.kv_rank", reads: &["model.family"], because: has_no_latents },
    Unused { key: "model.content_dim", reads: &["model.family"], because: has_no_latents },
    Unused { key: "model.rotary_dim", reads: &["model.family"], because: has_no_latents },
    Unused { key: "model.value_dim", reads: &["model.family"], because: has_no_latents },
    Unused {
        key: "model.window",
        reads: &["model.family"],
        because: |config| {
            let full = !config.model.blueprint().has_windows();
            full.then_some("in model.family tokens see all earlier ones, and only in \"gpt_oss\" a window of them")
        },
    },
    Unused { key: "model.rope_factor", reads: &["model.family"], because: stretches_nothing },
    Unused {
        key: "model.rope_pretrained",
        reads: &["model.family", "model.rope_factor"],
        because: |config| {
            let one = stretches_nothing(config).is_none() && !config.model.blueprint().stretches_positions();
            one.then_some("model.rope_factor = 1, as it is in \"llama\" where it is left out, stretches nothing")
                .or_else(|| stretches_nothing(config))
        },
    },
    Unused { key: "model.encoder_layers", reads: &["model.family"], because: has_one_stack },
    Unused { key: "model.decoder_layers", reads: &["model.family"], because: has_one_stack },
    Unused { key: "model.source_seq", reads: &["model.family"], because: has_one_stack },
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

/// The layers of both stacks, if both are given, are the model's.
pub(super) fn add_layers(source: &mut RecipeSource) {
    let layers = |stack: &str| source.value(&format!("model.{stack}_layers")).and_then(Value::as_integer);
    if let (Some(encoder), Some(decoder)) = (layers("encoder"), layers("decoder")) {
        source.set_default("model", "layers", encoder.saturating_add(decoder));
    }
}

fn has_no_latents(config: &Config) -> Option<&'static str> {
    let none = config.model.blueprint().heads.latent.is_none();
    none.then_some("only in model.family = \"deepseek_v3\" keys and values come from narrow vectors")
}

fn has_one_stack(config: &Config) -> Option<&'static str> {
    let alone = !config.model.blueprint().reads_a_source();
    alone.then_some("model.family has one stack of layers")
}

fn stretches_nothing(config: &Config) -> Option<&'static str> {
    let stretched = model::Config { rope_factor: Some(2.0), ..config.model.clone() };
    let stretches = stretched.blueprint().stretches_positions();
    (!stretches)
        .then_some("model.family does not stretch rotary positions, as \"llama\", \"gpt_oss\" and \"deepseek_v3\" can")
}

fn remembers_nothing(config: &Config) -> Option<&'static str> {
    let remembers = config.model.blueprint().is_segmented();
    (!remembers).then_some("only model.family = \"transformer_xl\" reads rows in segments")
}

fn heads_fit(config: &Config) -> Option<Finding> {
    let (heads, width, blueprint) = (config.model.heads, config.model.d_model, config.model.blueprint());
    if blueprint.heads.own_dim {
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

fn parts_turn_in_pairs(config: &Config) -> Option<Finding> {
    let width = config.model.rotary_dim.filter(|_| config.model.blueprint().heads.latent.is_some())?;
    turns_in_pairs(width, "rotary positions need an even width")
}

/// What is wrong with the width of what turns, if it is no even one.
fn turns_in_pairs(width: usize, wrong: &str) -> Option<Finding> {
    let nearest = || nearest_of(width, &[width - 1, width + 1].map(|even| even.max(2)));
    (!width.is_multiple_of(2)).then(|| Finding::new(wrong, nearest()))
}

fn own_heads_turn_in_pairs(config: &Config) -> Option<Finding> {
    let (blueprint, width) = (config.model.blueprint(), config.model.head_dim?);
    let own = blueprint.heads.own_dim;
    if own && blueprint.is_rotary() {
        turns_in_pairs(width, "rotary positions need an even width per head")
    } else {
        None
    }
}

fn kv_heads_fit(config: &Config) -> Option<Finding> {
    let (heads, kv_heads) = (config.model.heads, config.model.kv_heads?);
    let may_group = config.model.blueprint().heads.may_group;
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

/// Whether there are two stacks, and a layer for each.
fn is_stacked(config: &Config) -> bool {
    config.model.blueprint().reads_a_source() && config.model.layers >= 2
}

fn both_stacks_have_layers(config: &Config) -> Option<Finding> {
    let short = config.model.blueprint().reads_a_source() && !is_stacked(config);
    short.then(|| Finding::new("an encoder and a decoder have a layer each", "the nearest valid value is 2"))
}

fn the_encoder_leaves_layers(config: &Config) -> Option<Finding> {
    let encoder = config.model.encoder_layers.filter(|_| is_stacked(config))?;
    leaves_layers(encoder, ("decoder", config.model.layers))
}

fn the_decoder_leaves_layers(config: &Config) -> Option<Finding> {
    let (layers, decoder) = (config.model.layers, config.model.decoder_layers.filter(|_| is_stacked(config))?);
    let [encoder, _] = config.model.stack_layers()?;
    // What the encoder leaves nothing of is the encoder's fault.
    if decoder >= layers || encoder >= layers {
        return leaves_layers(decoder, ("encoder", layers));
    }
    (encoder + decoder != layers).then(|| {
        let wrong = format!("with model.encoder_layers = {encoder} that is not model.layers = {layers}");
        Finding::new(wrong, format!("the nearest valid value is {}, or leave model.layers out", layers - encoder))
    })
}

/// Why a stack of a model of `layers` layers cannot have so many, if it cannot.
fn leaves_layers(own: usize, (other, layers): (&str, usize)) -> Option<Finding> {
    (own >= layers).then(|| {
        let wrong = format!("leaves the {other} none of model.layers = {layers}");
        Finding::new(wrong, format!("the nearest valid value is {}", layers - 1))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load;

    /// What the rules say of so many layers of an encoder and a decoder, with and without experts' names.
    fn told(
        layers: usize,
        encoder_layers: Option<usize>,
        decoder_layers: Option<usize>,
    ) -> Vec<(&'static str, String)> {
        let recipe = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/quickstart.toml");
        let mut config = load(&recipe, &[], None).expect("a recipe of this repository").config;
        config.model.family = Value::from("m2m").try_into().expect("a family");
        (config.model.layers, config.model.encoder_layers, config.model.decoder_layers) =
            (layers, encoder_layers, decoder_layers);
        config.derive();
        let found = RULES.iter().filter_map(|rule| {
            let Finding { wrong, remedy } = (rule.check)(&config)?;
            Some((rule.key, format!("{wrong}; {remedy}")))
        });
        found.filter(|(key, _)| key.ends_with("layers")).collect()
    }

    #[test]
    fn both_stacks_of_a_model_have_layers_and_together_all() {
        for (layers, encoder, decoder) in
            [(2, None, None), (9, Some(6), None), (9, None, Some(3)), (9, Some(6), Some(3))]
        {
            assert_eq!(told(layers, encoder, decoder), [], "{layers} {encoder:?} {decoder:?}");
        }
        for (layers, encoder, decoder, key, words) in [
            (1, None, None, "model.layers", "the nearest valid value is 2"),
            (
                4,
                Some(9),
                None,
                "model.encoder_layers",
                "leaves the decoder none of model.layers = 4; the nearest valid value is 3",
            ),
            (4, Some(4), None, "model.encoder_layers", "leaves the decoder none"),
            (4, None, Some(4), "model.decoder_layers", "leaves the encoder none"),
            (
                9,
                Some(6),
                Some(2),
                "model.decoder_layers",
                "with model.encoder_layers = 6 that is not model.layers = 9; the nearest valid value is 3",
            ),
        ] {
            let found = told(layers, encoder, decoder);
            assert!(matches!(&found[..], [(blamed, text)] if *blamed == key && text.contains(words)), "{found:?}");
        }
    }
}
