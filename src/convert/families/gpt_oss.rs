//! GPT-OSS: experts of a layer are stacked and transposed, or packed in MXFP4, and their gates and ups come in turn.

use super::ForeignFamily;
use super::llama::{
    BALANCE, DROPOUT, HEADS, IDLE, KV_HEADS, LAYERS, PAD, REST, SEQ, SILU, STD, TIE, TIED, VOCAB, WIDTH,
};
use crate::checkpoint::WeightPacking;
use crate::convert::keys::{KeyMeaning, Plain, free, key, only, same};
use crate::convert::map::{ForeignPlace, MapRule, whole};
use crate::convert::moe_layers::LayerKeys;

const fn rule(here: &'static str, there: &'static [ForeignPlace]) -> MapRule {
    MapRule { here, there }
}

/// As published: not transposed, so that what shares a scale is of one row.
const PACKED_GATE_UP: ForeignPlace = whole("model.layers.{i}.mlp.experts.gate_up_proj_blocks")
    .stacked()
    .packed(WeightPacking::Mxfp4, "model.layers.{i}.mlp.experts.gate_up_proj_scales");

pub(in crate::convert) const GPT_OSS: ForeignFamily = ForeignFamily {
    model_type: "gpt_oss",
    architecture: "GptOssForCausalLM",
    family: "gpt_oss",
    keys: &[&[
        VOCAB,
        WIDTH,
        LAYERS,
        HEADS,
        KV_HEADS,
        key(&["head_dim"], KeyMeaning::OwnHeadDim(Some(64))),
        SEQ,
        same(
            &["rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta"],
            "model.rope_theta",
            Plain::Real(1.5e5),
        ),
        key(&["rope_parameters.rope_type", "rope_scaling.rope_type"], KeyMeaning::Stated(&[Plain::Text("yarn")])),
        same(&["rope_parameters.factor", "rope_scaling.factor"], "model.rope_factor", Plain::Required),
        same(
            &["rope_parameters.original_max_position_embeddings", "rope_scaling.original_max_position_embeddings"],
            "model.rope_pretrained",
            Plain::Required,
        ),
        only(&["rope_parameters.beta_fast", "rope_scaling.beta_fast"], &[Plain::Real(32.0)]),
        only(&["rope_parameters.beta_slow", "rope_scaling.beta_slow"], &[Plain::Real(1.0)]),
        // Absent it would be true, but not where all of these are absent.
        key(&["rope_parameters.truncate", "rope_scaling.truncate"], KeyMeaning::Stated(&[Plain::Bool(false)])),
        // The same as the original above, which alone is read there.
        free(&["initial_context_length"]),
        same(&["sliding_window"], "model.window", Plain::Required),
        key(&["layer_types"], KeyMeaning::Windows),
        same(&["rms_norm_eps"], "model.norm_eps", Plain::Real(1e-5)),
        STD,
        TIE,
        SILU,
        only(&["swiglu_limit"], &[Plain::Real(7.0)]),
        only(&["swiglu_alpha"], &[Plain::Real(1.702)]),
        only(&["attention_bias"], &[Plain::Bool(true)]),
        DROPOUT,
        PAD,
        same(&["intermediate_size"], "moe.d_expert", Plain::Required),
        same(&["num_local_experts", "num_experts"], "moe.experts", Plain::Required),
        same(&["num_experts_per_tok", "experts_per_token"], "moe.top_k", Plain::Required),
        BALANCE,
    ]],
    recipe: &[("moe.dialect", Plain::Text("hf"))],
    layers: Some(LayerKeys::All),
    map: &[
        rule(
            "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
            &[
                whole("model.layers.{i}.mlp.experts.gate_up_proj").stacked().transposed().part(0, 2).in_turn(),
                PACKED_GATE_UP.part(0, 2).in_turn(),
            ],
        ),
        rule(
            "model.layers.{i}.block_sparse_moe.experts.{e}.w1.bias",
            &[whole("model.layers.{i}.mlp.experts.gate_up_proj_bias").stacked().part(0, 2).in_turn()],
        ),
        rule(
            "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
            &[
                whole("model.layers.{i}.mlp.experts.gate_up_proj").stacked().transposed().part(1, 2).in_turn(),
                PACKED_GATE_UP.part(1, 2).in_turn(),
            ],
        ),
        rule(
            "model.layers.{i}.block_sparse_moe.experts.{e}.w3.bias",
            &[whole("model.layers.{i}.mlp.experts.gate_up_proj_bias").stacked().part(1, 2).in_turn()],
        ),
        rule(
            "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
            &[
                whole("model.layers.{i}.mlp.experts.down_proj").stacked().transposed(),
                whole("model.layers.{i}.mlp.experts.down_proj_blocks")
                    .stacked()
                    .packed(WeightPacking::Mxfp4, "model.layers.{i}.mlp.experts.down_proj_scales"),
            ],
        ),
        rule(
            "model.layers.{i}.block_sparse_moe.experts.{e}.w2.bias",
            &[whole("model.layers.{i}.mlp.experts.down_proj_bias").stacked()],
        ),
        rule("model.layers.{i}.block_sparse_moe.gate.{rest}", &[whole("model.layers.{i}.mlp.router.{rest}")]),
        REST,
    ],
    prefix: None,
    twins: TIED,
    idle: IDLE,
};
