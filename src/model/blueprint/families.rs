//! The families: the one place that reads [`Family`]. Sizes are the recipe's; what is a number here is the same in every
//! published model of the family.

use super::{
    Blueprint, EmbeddingKind, ExpertsKind, HeadKind, HeadsKind, LatentKind, ModelShape, NormKind, NormNames, NormPlace,
    Positions, QueryKeyNorm, RotaryScaling, Sharpening, Window,
};
use crate::model::{Config, Family};
use crate::moe::Activation;

impl Blueprint {
    /// What a family makes of a recipe's sizes.
    pub fn new(model: &Config) -> Blueprint {
        let (llama, gpt2) = (llama(model), gpt2(model));
        match model.family {
            Family::Mixtral => llama,
            Family::Llama => Blueprint { positions: scaled(llama.positions, llama_scaling(model)), ..llama },
            Family::Gpt2 => gpt2,
            Family::Bert => bert(model, gpt2),
            Family::TransformerXl => transformer_xl(gpt2),
            Family::Olmoe => with_heads(llama, |heads| {
                let (kv_heads, query_key_norm) = (heads.heads, QueryKeyNorm::Width);
                *heads = HeadsKind { kv_heads, may_group: false, query_key_norm, ..*heads };
            }),
            Family::Qwen2Moe => Blueprint {
                experts: ExpertsKind { gated_shared: true, ..llama.experts },
                ..with_heads(llama, |heads| heads.biases = true)
            },
            Family::Qwen3Moe => with_heads(llama, |heads| {
                let head_dim = model.head_dim.unwrap_or(128);
                *heads = HeadsKind { head_dim, own_dim: true, query_key_norm: QueryKeyNorm::Head, ..*heads };
            }),
            Family::DeepseekV3 => deepseek_v3(model, llama),
            Family::GptOss => gpt_oss(model, llama),
            Family::M2m | Family::NllbMoe => m2m(model, gpt2),
            Family::Switch => switch(model, llama),
        }
    }
}

fn with_heads(mut of: Blueprint, change: impl FnOnce(&mut HeadsKind)) -> Blueprint {
    change(&mut of.heads);
    of
}

/// RMS norms, rotary positions, grouped heads, SwiGLU, no biases.
fn llama(model: &Config) -> Blueprint {
    let kv_heads = model.kv_heads.unwrap_or(model.heads);
    Blueprint {
        norm: NormKind::Rms,
        positions: Positions::Rotary { theta: model.rope_theta, scaling: RotaryScaling::None },
        activation: Activation::SwiGlu,
        ..with_heads(gpt2(model), |heads| {
            *heads = HeadsKind { kv_heads, may_group: true, biases: false, out_bias: false, ..*heads };
        })
    }
}

/// Layer norms, learned positions, GELU, biases.
fn gpt2(model: &Config) -> Blueprint {
    let heads = HeadsKind {
        heads: model.heads,
        kv_heads: model.heads,
        may_group: false,
        // No heads at all are refused elsewhere.
        head_dim: model.d_model / model.heads.max(1),
        own_dim: false,
        biases: true,
        out_bias: true,
        query_key_norm: QueryKeyNorm::None,
        scaled: true,
        sinks: false,
        latent: None,
    };
    Blueprint {
        shape: ModelShape::Decoder { layers: model.layers },
        norm: NormKind::Layer,
        norm_place: NormPlace::Before,
        norm_names: NormNames::Llama,
        positions: Positions::Learned,
        embedding: EmbeddingKind { scaled: false, normed: false },
        heads,
        window: Window::Full,
        activation: Activation::Gelu,
        experts: ExpertsKind { gated_shared: false, router_bias: false },
        head: HeadKind::Linear,
    }
}

fn bert(model: &Config, gpt2: Blueprint) -> Blueprint {
    Blueprint {
        shape: ModelShape::Encoder { layers: model.layers },
        norm_place: NormPlace::After,
        norm_names: NormNames::Fairseq,
        embedding: EmbeddingKind { scaled: false, normed: true },
        head: HeadKind::Masked,
        ..gpt2
    }
}

fn transformer_xl(gpt2: Blueprint) -> Blueprint {
    Blueprint {
        norm_place: NormPlace::After,
        norm_names: NormNames::Fairseq,
        positions: Positions::Relative,
        embedding: EmbeddingKind { scaled: true, normed: false },
        activation: Activation::Relu,
        ..with_heads(gpt2, |heads| (heads.biases, heads.out_bias) = (false, false))
    }
}

/// As published, where the recipe does not say otherwise.
fn deepseek_v3(model: &Config, llama: Blueprint) -> Blueprint {
    let latent = LatentKind {
        query_rank: Some(model.query_rank.unwrap_or(1536)).filter(|rank| *rank > 0),
        kv_rank: model.kv_rank.unwrap_or(512),
        content_dim: model.content_dim.unwrap_or(128),
        rotary_dim: model.rotary_dim.unwrap_or(64),
        value_dim: model.value_dim.unwrap_or(128),
    };
    let stretched = yarn(model, 40.0, Sharpening::Scores);
    Blueprint {
        // Some models of the family have ordinary positions.
        positions: scaled(
            llama.positions,
            if model.rope_factor == Some(1.0) { RotaryScaling::None } else { stretched },
        ),
        ..with_heads(llama, |heads| {
            let (kv_heads, head_dim) = (heads.heads, latent.content_dim + latent.rotary_dim);
            *heads = HeadsKind { kv_heads, may_group: false, head_dim, own_dim: true, latent: Some(latent), ..*heads };
        })
    }
}

fn gpt_oss(model: &Config, llama: Blueprint) -> Blueprint {
    let scaling = yarn(model, 32.0, Sharpening::Turned);
    Blueprint {
        positions: scaled(llama.positions, scaling),
        window: Window::Alternating { tokens: model.window.unwrap_or(128) },
        activation: Activation::ClampedSwiGlu,
        experts: ExpertsKind { router_bias: true, ..llama.experts },
        ..with_heads(llama, |heads| {
            let head_dim = model.head_dim.unwrap_or(64);
            *heads = HeadsKind { head_dim, own_dim: true, biases: true, out_bias: true, sinks: true, ..*heads };
        })
    }
}

/// As published, or as the recipe says. DeepSeek cuts at whole pairs, GPT-OSS does not.
fn yarn(model: &Config, published: f32, sharpening: Sharpening) -> RotaryScaling {
    let (factor, pretrained) = (model.rope_factor.unwrap_or(published), model.rope_pretrained.unwrap_or(4096));
    let truncates = sharpening == Sharpening::Scores;
    RotaryScaling::Yarn { factor, pretrained, fast: 32.0, slow: 1.0, truncates, sharpening }
}

/// Of Llama 3.1 and later, where the recipe says by how much.
fn llama_scaling(model: &Config) -> RotaryScaling {
    match model.rope_factor {
        None | Some(1.0) => RotaryScaling::None,
        Some(factor) => {
            let pretrained = model.rope_pretrained.unwrap_or(8192);
            RotaryScaling::Llama { factor, pretrained, fast: 4.0, slow: 1.0 }
        }
    }
}

fn scaled(positions: Positions, scaling: RotaryScaling) -> Positions {
    match positions {
        Positions::Rotary { theta, .. } => Positions::Rotary { theta, scaling },
        other => other,
    }
}

/// Both stacks as deep, where a recipe does not say otherwise.
fn encoder_decoder(model: &Config) -> ModelShape {
    let left = |taken: usize| model.layers.saturating_sub(taken);
    let (encoder, decoder) = match (model.encoder_layers, model.decoder_layers) {
        (Some(encoder), Some(decoder)) => (encoder, decoder),
        (Some(encoder), None) => (encoder, left(encoder)),
        (None, Some(decoder)) => (left(decoder), decoder),
        (None, None) => (model.layers / 2, left(model.layers / 2)),
    };
    ModelShape::EncoderDecoder { encoder, decoder }
}

/// M2M100, and NLLB, which is the same with experts.
fn m2m(model: &Config, gpt2: Blueprint) -> Blueprint {
    Blueprint {
        shape: encoder_decoder(model),
        norm_names: NormNames::Fairseq,
        // Rows 0 and 1 are of the beginning of a text and of padding.
        positions: Positions::Sinusoidal { first: 2 },
        embedding: EmbeddingKind { scaled: true, normed: false },
        activation: Activation::Relu,
        ..gpt2
    }
}

fn switch(model: &Config, llama: Blueprint) -> Blueprint {
    Blueprint {
        shape: encoder_decoder(model),
        norm_names: NormNames::Fairseq,
        positions: Positions::RelativeBias { buckets: 32, furthest: 128 },
        activation: Activation::PlainRelu,
        head: HeadKind::ScaledIfTied,
        ..with_heads(llama, |heads| {
            *heads = HeadsKind {
                kv_heads: heads.heads,
                may_group: false,
                head_dim: model.head_dim.unwrap_or(64),
                own_dim: true,
                scaled: false,
                ..*heads
            };
        })
    }
}
