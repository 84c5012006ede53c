//! M2M100, and NLLB, which is the same with experts and some other names.

use super::ForeignFamily;
use crate::convert::keys::{ForeignKey, KeyMeaning, Plain, free, key, only, same, training};
use crate::convert::map::{ForeignPlace, MapRule, whole};
use crate::convert::moe_layers::LayerKeys;

const fn rule(here: &'static str, there: &'static [ForeignPlace]) -> MapRule {
    MapRule { here, there }
}

const TABLE: MapRule = rule("model.embed_tokens.weight", &[whole("model.shared.weight")]);
const OUT: MapRule =
    rule("model.{s}.layers.{i}.self_attn.o_proj.{rest}", &[whole("model.{s}.layers.{i}.self_attn.out_proj.{rest}")]);
const REST: MapRule = rule("{rest}", &[whole("{rest}")]);
/// One table, under as many names as older versions stored.
const TWINS: &[(&str, &str)] = &[
    ("lm_head.weight", "model.embed_tokens.weight"),
    ("model.encoder.embed_tokens.weight", "model.embed_tokens.weight"),
    ("model.decoder.embed_tokens.weight", "model.embed_tokens.weight"),
];
/// Sines and cosines that older versions stored.
const IDLE: &[&str] = &["model.{s}.embed_positions.weights"];
/// One table of tokens serves both stacks and the head.
const TIED: (&str, Plain) = ("model.tie_embeddings", Plain::Bool(true));

const VOCAB: ForeignKey = same(&["vocab_size"], "model.vocab", Plain::Required);
const WIDTH: ForeignKey = same(&["d_model"], "model.d_model", Plain::Required);
const ENCODER_LAYERS: ForeignKey = same(&["encoder_layers"], "model.encoder_layers", Plain::Required);
const DECODER_LAYERS: ForeignKey = same(&["decoder_layers"], "model.decoder_layers", Plain::Required);
const ENCODER_HEADS: ForeignKey = same(&["encoder_attention_heads"], "model.heads", Plain::Required);
const DECODER_HEADS: ForeignKey = same(&["decoder_attention_heads"], "model.heads", Plain::Required);
const ENCODER_FF: ForeignKey = same(&["encoder_ffn_dim"], "model.d_ff", Plain::Required);
const DECODER_FF: ForeignKey = same(&["decoder_ffn_dim"], "model.d_ff", Plain::Required);
const SEQ: ForeignKey = same(&["max_position_embeddings"], "model.seq", Plain::Required);
const STD: ForeignKey = same(&["init_std"], "model.init_std", Plain::Real(0.02));
const DROPOUT: ForeignKey = same(&["dropout"], "model.dropout", Plain::Real(0.1));
const ATTENTION_DROPOUT: ForeignKey = training(&["attention_dropout"], Plain::Real(0.0));
const ACTIVATION_DROPOUT: ForeignKey = training(&["activation_dropout"], Plain::Real(0.0));
const CLASSIFIER_DROPOUT: ForeignKey = free(&["classifier_dropout"]);
const ENCODER_DROP: ForeignKey = training(&["encoder_layerdrop"], Plain::Real(0.0));
const DECODER_DROP: ForeignKey = training(&["decoder_layerdrop"], Plain::Real(0.0));
const RELU: ForeignKey = only(&["activation_function"], &[Plain::Text("relu")]);
const SCALED: ForeignKey = only(&["scale_embedding"], &[Plain::Bool(true)]);
const TIE: ForeignKey = only(&["tie_word_embeddings"], &[Plain::Bool(true)]);
/// Positions are counted from behind the number of padding.
const PAD: ForeignKey = only(&["pad_token_id"], &[Plain::Whole(1)]);
const TWO_STACKS: ForeignKey = only(&["is_encoder_decoder"], &[Plain::Bool(true)]);
const BEGIN: ForeignKey = free(&["decoder_start_token_id"]);
const FORCED: ForeignKey = free(&["forced_bos_token_id", "forced_eos_token_id"]);
const SEARCH: ForeignKey = free(&["early_stopping", "max_length", "num_beams"]);
/// The encoder's once more.
const MORE_LAYERS: ForeignKey = free(&["num_hidden_layers"]);

/// M2M100 and NLLB differ by experts alone.
const OF_BOTH: &[ForeignKey] = &[
    VOCAB,
    WIDTH,
    ENCODER_LAYERS,
    DECODER_LAYERS,
    ENCODER_HEADS,
    DECODER_HEADS,
    ENCODER_FF,
    DECODER_FF,
    SEQ,
    STD,
    DROPOUT,
    ATTENTION_DROPOUT,
    ACTIVATION_DROPOUT,
    CLASSIFIER_DROPOUT,
    ENCODER_DROP,
    DECODER_DROP,
    RELU,
    SCALED,
    TIE,
    PAD,
    TWO_STACKS,
    BEGIN,
    FORCED,
    SEARCH,
    MORE_LAYERS,
];

pub(in crate::convert) const M2M: ForeignFamily = ForeignFamily {
    model_type: "m2m_100",
    architecture: "M2M100ForConditionalGeneration",
    family: "m2m",
    keys: &[OF_BOTH],
    recipe: &[TIED],
    layers: None,
    map: &[
        TABLE,
        OUT,
        rule(
            "model.decoder.layers.{i}.encoder_attn.o_proj.{rest}",
            &[whole("model.decoder.layers.{i}.encoder_attn.out_proj.{rest}")],
        ),
        rule("model.{s}.layers.{i}.mlp.fc_in.{rest}", &[whole("model.{s}.layers.{i}.fc1.{rest}")]),
        rule("model.{s}.layers.{i}.mlp.fc_out.{rest}", &[whole("model.{s}.layers.{i}.fc2.{rest}")]),
        REST,
    ],
    prefix: None,
    twins: TWINS,
    idle: IDLE,
};

pub(in crate::convert) const NLLB_MOE: ForeignFamily = ForeignFamily {
    model_type: "nllb-moe",
    architecture: "NllbMoeForConditionalGeneration",
    family: "nllb_moe",
    keys: &[
        OF_BOTH,
        &[
            same(&["num_experts"], "moe.experts", Plain::Required),
            same(&["router_aux_loss_coef"], "moe.balance_weight", Plain::Real(0.001)),
            same(&["router_z_loss_coef"], "moe.z_weight", Plain::Real(0.001)),
            key(&["encoder_sparse_step", "decoder_sparse_step"], KeyMeaning::Layers),
            only(&["second_expert_policy"], &[Plain::Text("all")]),
            only(&["router_bias"], &[Plain::Bool(false)]),
            only(&["router_dtype"], &[Plain::Text("float32")]),
            only(&["router_ignore_padding_tokens"], &[Plain::Bool(false)]),
            // Experts have a place for every token.
            only(&["moe_eval_capacity_token_fraction"], &[Plain::Real(1.0)]),
            same(&["moe_token_dropout"], "moe.output_masking", Plain::Real(0.2)),
            // Written into files, and read by nobody.
            free(&["router_jitter_noise"]),
            // By whom places are lost in training, where they are fewer.
            training(&["expert_capacity"], Plain::Whole(64)),
            training(&["batch_prioritized_routing"], Plain::Bool(false)),
            training(&["normalize_router_prob_before_dropping"], Plain::Bool(false)),
            free(&["router_type"]),
        ],
    ],
    recipe: &[TIED, ("moe.top_k", Plain::Whole(2)), ("moe.dialect", Plain::Text("hf"))],
    layers: Some(LayerKeys::StepOfStacks),
    map: &[
        TABLE,
        OUT,
        rule(
            "model.decoder.layers.{i}.encoder_attn.o_proj.{rest}",
            &[whole("model.decoder.layers.{i}.cross_attention.out_proj.{rest}")],
        ),
        rule(
            "model.decoder.layers.{i}.encoder_attn.{rest}",
            &[whole("model.decoder.layers.{i}.cross_attention.{rest}")],
        ),
        rule(
            "model.decoder.layers.{i}.encoder_attn_layer_norm.{rest}",
            &[whole("model.decoder.layers.{i}.cross_attention_layer_norm.{rest}")],
        ),
        rule("model.{s}.layers.{i}.final_layer_norm.{rest}", &[whole("model.{s}.layers.{i}.ff_layer_norm.{rest}")]),
        rule("model.{s}.layers.{i}.mlp.fc_in.{rest}", &[whole("model.{s}.layers.{i}.ffn.fc1.{rest}")]),
        rule("model.{s}.layers.{i}.mlp.fc_out.{rest}", &[whole("model.{s}.layers.{i}.ffn.fc2.{rest}")]),
        rule(
            "model.{s}.layers.{i}.block_sparse_moe.experts.{e}.fc_in.{rest}",
            &[whole("model.{s}.layers.{i}.ffn.experts.expert_{e}.fc1.{rest}")],
        ),
        rule(
            "model.{s}.layers.{i}.block_sparse_moe.experts.{e}.fc_out.{rest}",
            &[whole("model.{s}.layers.{i}.ffn.experts.expert_{e}.fc2.{rest}")],
        ),
        rule(
            "model.{s}.layers.{i}.block_sparse_moe.gate.weight",
            &[whole("model.{s}.layers.{i}.ffn.router.classifier.weight")],
        ),
        REST,
    ],
    prefix: None,
    twins: TWINS,
    idle: IDLE,
};
