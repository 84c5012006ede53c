//! Switch Transformers: T5's names, and experts in both stacks.

use super::ForeignFamily;
use crate::convert::keys::{KeyMeaning, Plain, free, key, only, same, training};
use crate::convert::map::{ForeignPlace, MapRule, whole};
use crate::convert::moe_layers::LayerKeys;

const fn rule(here: &'static str, there: &'static [ForeignPlace]) -> MapRule {
    MapRule { here, there }
}

pub(in crate::convert) const SWITCH: ForeignFamily = ForeignFamily {
    model_type: "switch_transformers",
    architecture: "SwitchTransformersForConditionalGeneration",
    family: "switch",
    keys: &[&[
        same(&["vocab_size"], "model.vocab", Plain::Required),
        same(&["d_model"], "model.d_model", Plain::Required),
        same(&["d_kv"], "model.head_dim", Plain::Whole(64)),
        same(&["d_ff"], "model.d_ff", Plain::Required),
        // Experts are as wide as dense feed-forwards.
        same(&["d_ff"], "moe.d_expert", Plain::Required),
        same(&["num_layers"], "model.encoder_layers", Plain::Required),
        same(&["num_decoder_layers"], "model.decoder_layers", Plain::Required),
        same(&["num_heads"], "model.heads", Plain::Required),
        same(&["layer_norm_epsilon"], "model.norm_eps", Plain::Real(1e-6)),
        same(&["dropout_rate"], "model.dropout", Plain::Real(0.1)),
        same(&["tie_word_embeddings"], "model.tie_embeddings", Plain::Bool(true)),
        training(&["initializer_factor"], Plain::Real(1.0)),
        only(&["relative_attention_num_buckets"], &[Plain::Whole(32)]),
        only(&["relative_attention_max_distance"], &[Plain::Whole(128)]),
        only(&["dense_act_fn"], &[Plain::Text("relu")]),
        only(&["feed_forward_proj"], &[Plain::Text("relu")]),
        only(&["is_gated_act"], &[Plain::Bool(false)]),
        only(&["is_encoder_decoder"], &[Plain::Bool(true)]),
        only(&["is_decoder"], &[Plain::Bool(false)]),
        only(&["add_cross_attention"], &[Plain::Bool(false)]),
        same(&["num_experts"], "moe.experts", Plain::Required),
        only(&["num_selected_experts"], &[Plain::Whole(1)]),
        // Tokens of a row beyond it have no expert, so rows are as long as that none are.
        key(&["expert_capacity"], KeyMeaning::RowLength(64)),
        same(&["router_jitter_noise"], "moe.jitter", Plain::Real(0.01)),
        same(&["router_aux_loss_coef"], "moe.balance_weight", Plain::Real(0.001)),
        same(&["router_z_loss_coef"], "moe.z_weight", Plain::Real(0.001)),
        only(&["router_bias"], &[Plain::Bool(false)]),
        only(&["router_dtype"], &[Plain::Text("float32")]),
        only(&["router_ignore_padding_tokens"], &[Plain::Bool(false)]),
        key(
            &["num_sparse_encoder_layers", "num_sparse_decoder_layers", "encoder_sparse_step", "decoder_sparse_step"],
            KeyMeaning::Layers,
        ),
        free(&["router_type"]),
        free(&["add_router_probs"]),
        free(&["pad_token_id"]),
        free(&["decoder_start_token_id"]),
        free(&["n_positions"]),
        free(&["output_past"]),
    ]],
    recipe: &[("moe.gate", Plain::Text("switch")), ("moe.top_k", Plain::Whole(1))],
    layers: Some(LayerKeys::CountsOfStacks),
    map: &[
        rule("model.embed_tokens.weight", &[whole("shared.weight")]),
        rule("lm_head.weight", &[whole("lm_head.weight")]),
        rule(
            "model.{s}.relative_attention_bias.weight",
            &[whole("{s}.block.0.layer.0.SelfAttention.relative_attention_bias.weight")],
        ),
        rule("model.{s}.layer_norm.weight", &[whole("{s}.final_layer_norm.weight")]),
        rule("model.{s}.layers.{i}.self_attn.q_proj.weight", &[whole("{s}.block.{i}.layer.0.SelfAttention.q.weight")]),
        rule("model.{s}.layers.{i}.self_attn.k_proj.weight", &[whole("{s}.block.{i}.layer.0.SelfAttention.k.weight")]),
        rule("model.{s}.layers.{i}.self_attn.v_proj.weight", &[whole("{s}.block.{i}.layer.0.SelfAttention.v.weight")]),
        rule("model.{s}.layers.{i}.self_attn.o_proj.weight", &[whole("{s}.block.{i}.layer.0.SelfAttention.o.weight")]),
        rule("model.{s}.layers.{i}.self_attn_layer_norm.weight", &[whole("{s}.block.{i}.layer.0.layer_norm.weight")]),
        rule(
            "model.decoder.layers.{i}.encoder_attn.q_proj.weight",
            &[whole("decoder.block.{i}.layer.1.EncDecAttention.q.weight")],
        ),
        rule(
            "model.decoder.layers.{i}.encoder_attn.k_proj.weight",
            &[whole("decoder.block.{i}.layer.1.EncDecAttention.k.weight")],
        ),
        rule(
            "model.decoder.layers.{i}.encoder_attn.v_proj.weight",
            &[whole("decoder.block.{i}.layer.1.EncDecAttention.v.weight")],
        ),
        rule(
            "model.decoder.layers.{i}.encoder_attn.o_proj.weight",
            &[whole("decoder.block.{i}.layer.1.EncDecAttention.o.weight")],
        ),
        rule(
            "model.decoder.layers.{i}.encoder_attn_layer_norm.weight",
            &[whole("decoder.block.{i}.layer.1.layer_norm.weight")],
        ),
        // Feed-forwards are the last of two sub-layers, or of three.
        rule(
            "model.encoder.layers.{i}.final_layer_norm.weight",
            &[whole("encoder.block.{i}.layer.1.layer_norm.weight")],
        ),
        rule("model.encoder.layers.{i}.mlp.fc_in.weight", &[whole("encoder.block.{i}.layer.1.mlp.wi.weight")]),
        rule("model.encoder.layers.{i}.mlp.fc_out.weight", &[whole("encoder.block.{i}.layer.1.mlp.wo.weight")]),
        rule(
            "model.encoder.layers.{i}.block_sparse_moe.gate.weight",
            &[whole("encoder.block.{i}.layer.1.mlp.router.classifier.weight")],
        ),
        rule(
            "model.encoder.layers.{i}.block_sparse_moe.experts.{e}.fc_in.weight",
            &[whole("encoder.block.{i}.layer.1.mlp.experts.expert_{e}.wi.weight")],
        ),
        rule(
            "model.encoder.layers.{i}.block_sparse_moe.experts.{e}.fc_out.weight",
            &[whole("encoder.block.{i}.layer.1.mlp.experts.expert_{e}.wo.weight")],
        ),
        rule(
            "model.decoder.layers.{i}.final_layer_norm.weight",
            &[whole("decoder.block.{i}.layer.2.layer_norm.weight")],
        ),
        rule("model.decoder.layers.{i}.mlp.fc_in.weight", &[whole("decoder.block.{i}.layer.2.mlp.wi.weight")]),
        rule("model.decoder.layers.{i}.mlp.fc_out.weight", &[whole("decoder.block.{i}.layer.2.mlp.wo.weight")]),
        rule(
            "model.decoder.layers.{i}.block_sparse_moe.gate.weight",
            &[whole("decoder.block.{i}.layer.2.mlp.router.classifier.weight")],
        ),
        rule(
            "model.decoder.layers.{i}.block_sparse_moe.experts.{e}.fc_in.weight",
            &[whole("decoder.block.{i}.layer.2.mlp.experts.expert_{e}.wi.weight")],
        ),
        rule(
            "model.decoder.layers.{i}.block_sparse_moe.experts.{e}.fc_out.weight",
            &[whole("decoder.block.{i}.layer.2.mlp.experts.expert_{e}.wo.weight")],
        ),
    ],
    prefix: None,
    // One table, under as many names as older versions stored.
    twins: &[
        ("lm_head.weight", "model.embed_tokens.weight"),
        ("encoder.embed_tokens.weight", "model.embed_tokens.weight"),
        ("decoder.embed_tokens.weight", "model.embed_tokens.weight"),
    ],
    // Distances to another text mean nothing: older versions stored a table of them, and never used it.
    idle: &["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"],
};
