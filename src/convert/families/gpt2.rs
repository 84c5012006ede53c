//! GPT-2: matrices are transposed, and queries, keys and values are one.

use super::ForeignFamily;
use crate::convert::keys::{KeyMeaning, Plain, free, key, only, same, training};
use crate::convert::map::{ForeignPlace, MapRule, whole};

const fn rule(here: &'static str, there: &'static [ForeignPlace]) -> MapRule {
    MapRule { here, there }
}

pub(in crate::convert) const GPT2: ForeignFamily = ForeignFamily {
    model_type: "gpt2",
    architecture: "GPT2LMHeadModel",
    family: "gpt2",
    keys: &[&[
        same(&["vocab_size"], "model.vocab", Plain::Required),
        same(&["n_positions"], "model.seq", Plain::Required),
        same(&["n_embd"], "model.d_model", Plain::Required),
        same(&["n_layer"], "model.layers", Plain::Required),
        same(&["n_head"], "model.heads", Plain::Required),
        same(&["n_inner"], "model.d_ff", Plain::Null),
        same(&["layer_norm_epsilon"], "model.norm_eps", Plain::Real(1e-5)),
        same(&["initializer_range"], "model.init_std", Plain::Real(0.02)),
        same(&["tie_word_embeddings"], "model.tie_embeddings", Plain::Bool(true)),
        same(&["resid_pdrop"], "model.dropout", Plain::Real(0.1)),
        same(&["embd_pdrop"], "model.dropout", Plain::Real(0.1)),
        training(&["attn_pdrop"], Plain::Real(0.0)),
        only(&["activation_function"], &[Plain::Text("gelu_new"), Plain::Text("gelu_pytorch_tanh")]),
        only(&["scale_attn_weights"], &[Plain::Bool(true)]),
        only(&["scale_attn_by_inverse_layer_idx"], &[Plain::Bool(false)]),
        only(&["add_cross_attention"], &[Plain::Bool(false)]),
        // How products are computed, not what.
        key(&["reorder_and_upcast_attn"], KeyMeaning::Free(Some(Plain::Bool(false)))),
        free(&["n_ctx"]),
        free(&["pad_token_id"]),
        free(&["summary_activation"]),
        free(&["summary_first_dropout"]),
        free(&["summary_proj_to_labels"]),
        free(&["summary_type"]),
        free(&["summary_use_proj"]),
    ]],
    recipe: &[],
    layers: None,
    map: &[
        rule("model.embed_tokens.weight", &[whole("transformer.wte.weight")]),
        rule("model.embed_positions.weight", &[whole("transformer.wpe.weight")]),
        rule("model.layers.{i}.input_layernorm.{rest}", &[whole("transformer.h.{i}.ln_1.{rest}")]),
        rule("model.layers.{i}.post_attention_layernorm.{rest}", &[whole("transformer.h.{i}.ln_2.{rest}")]),
        rule(
            "model.layers.{i}.self_attn.q_proj.weight",
            &[whole("transformer.h.{i}.attn.c_attn.weight").transposed().part(0, 3)],
        ),
        rule(
            "model.layers.{i}.self_attn.k_proj.weight",
            &[whole("transformer.h.{i}.attn.c_attn.weight").transposed().part(1, 3)],
        ),
        rule(
            "model.layers.{i}.self_attn.v_proj.weight",
            &[whole("transformer.h.{i}.attn.c_attn.weight").transposed().part(2, 3)],
        ),
        rule("model.layers.{i}.self_attn.q_proj.bias", &[whole("transformer.h.{i}.attn.c_attn.bias").part(0, 3)]),
        rule("model.layers.{i}.self_attn.k_proj.bias", &[whole("transformer.h.{i}.attn.c_attn.bias").part(1, 3)]),
        rule("model.layers.{i}.self_attn.v_proj.bias", &[whole("transformer.h.{i}.attn.c_attn.bias").part(2, 3)]),
        rule("model.layers.{i}.self_attn.o_proj.weight", &[whole("transformer.h.{i}.attn.c_proj.weight").transposed()]),
        rule("model.layers.{i}.self_attn.o_proj.bias", &[whole("transformer.h.{i}.attn.c_proj.bias")]),
        rule("model.layers.{i}.mlp.fc_in.weight", &[whole("transformer.h.{i}.mlp.c_fc.weight").transposed()]),
        rule("model.layers.{i}.mlp.fc_in.bias", &[whole("transformer.h.{i}.mlp.c_fc.bias")]),
        rule("model.layers.{i}.mlp.fc_out.weight", &[whole("transformer.h.{i}.mlp.c_proj.weight").transposed()]),
        rule("model.layers.{i}.mlp.fc_out.bias", &[whole("transformer.h.{i}.mlp.c_proj.bias")]),
        rule("model.norm.{rest}", &[whole("transformer.ln_f.{rest}")]),
        rule("lm_head.weight", &[whole("lm_head.weight")]),
    ],
    prefix: Some("transformer."),
    twins: &[("lm_head.weight", "model.embed_tokens.weight")],
    // Masks that older versions stored.
    idle: &[
        "transformer.h.{i}.attn.bias",
        "transformer.h.{i}.attn.masked_bias",
        "h.{i}.attn.bias",
        "h.{i}.attn.masked_bias",
    ],
};
