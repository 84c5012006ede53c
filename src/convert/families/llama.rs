//! Llama, and the families of its kind with experts: their tensors have the same names but for experts.

use super::ForeignFamily;
use crate::convert::keys::{ForeignKey, KeyMeaning, Plain, free, key, only, same, stretched, training};
use crate::convert::map::{MapRule, whole};
use crate::convert::moe_layers::LayerKeys;

pub(super) const REST: MapRule = MapRule { here: "{rest}", there: &[whole("{rest}")] };
pub(super) const TIED: &[(&str, &str)] = &[("lm_head.weight", "model.embed_tokens.weight")];
/// Buffers that older versions stored.
pub(super) const IDLE: &[&str] = &["model.layers.{i}.self_attn.rotary_emb.inv_freq"];

pub(super) const VOCAB: ForeignKey = same(&["vocab_size"], "model.vocab", Plain::Required);
pub(super) const WIDTH: ForeignKey = same(&["hidden_size"], "model.d_model", Plain::Required);
pub(super) const LAYERS: ForeignKey = same(&["num_hidden_layers"], "model.layers", Plain::Required);
pub(super) const HEADS: ForeignKey = same(&["num_attention_heads"], "model.heads", Plain::Required);
pub(super) const KV_HEADS: ForeignKey = same(&["num_key_value_heads"], "model.kv_heads", Plain::Required);
pub(super) const SEQ: ForeignKey = same(&["max_position_embeddings"], "model.seq", Plain::Required);
pub(super) const THETA: ForeignKey = same(
    &["rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta"],
    "model.rope_theta",
    Plain::Real(1e4),
);
pub(super) const ROPE_TYPES: &[&str] =
    &["rope_parameters.rope_type", "rope_parameters.type", "rope_scaling.rope_type", "rope_scaling.type"];
const ROPE: ForeignKey = only(ROPE_TYPES, &[Plain::Text("default")]);
pub(super) const STRETCH: ForeignKey = stretched(
    &["rope_parameters.factor", "rope_scaling.factor"],
    &KeyMeaning::Same("model.rope_factor", Plain::Required),
);
pub(super) const STRETCHED_FROM: ForeignKey = stretched(
    &["rope_parameters.original_max_position_embeddings", "rope_scaling.original_max_position_embeddings"],
    &KeyMeaning::Same("model.rope_pretrained", Plain::Required),
);
pub(super) const NO_SCALING: ForeignKey = only(&["rope_scaling"], &[Plain::Null]);
pub(super) const HEAD_DIM: ForeignKey = key(&["head_dim"], KeyMeaning::HeadDim);
pub(super) const EPS: ForeignKey = same(&["rms_norm_eps"], "model.norm_eps", Plain::Real(1e-6));
pub(super) const STD: ForeignKey = same(&["initializer_range"], "model.init_std", Plain::Real(0.02));
pub(super) const TIE: ForeignKey = same(&["tie_word_embeddings"], "model.tie_embeddings", Plain::Bool(false));
pub(super) const SILU: ForeignKey = only(&["hidden_act"], &[Plain::Text("silu"), Plain::Text("swish")]);
pub(super) const NO_BIAS: ForeignKey = only(&["attention_bias"], &[Plain::Bool(false)]);
pub(super) const DROPOUT: ForeignKey = training(&["attention_dropout"], Plain::Real(0.0));
pub(super) const PAD: ForeignKey = free(&["pad_token_id"]);
const NO_WINDOW: ForeignKey = only(&["use_sliding_window"], &[Plain::Bool(false)]);
/// Of windows that are not used.
const OF_WINDOWS: ForeignKey = free(&["sliding_window", "max_window_layers"]);
pub(super) const BALANCE: ForeignKey = same(&["router_aux_loss_coef"], "moe.balance_weight", Plain::Real(0.001));
pub(super) const TOP_K: ForeignKey = same(&["num_experts_per_tok"], "moe.top_k", Plain::Required);

/// What every family of this kind says alike.
const OF_ALL: &[ForeignKey] = &[VOCAB, WIDTH, LAYERS, HEADS, SEQ, NO_SCALING, STD, TIE, SILU, DROPOUT, PAD];

pub(in crate::convert) const LLAMA: ForeignFamily = ForeignFamily {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    family: "llama",
    keys: &[
        OF_ALL,
        &[
            // Of Llama 3.1 and later, which have the same numbers of turns.
            key(ROPE_TYPES, KeyMeaning::Stretch("llama3", Plain::Null)),
            STRETCH,
            STRETCHED_FROM,
            stretched(
                &["rope_parameters.low_freq_factor", "rope_scaling.low_freq_factor"],
                &KeyMeaning::Stated(&[Plain::Real(1.0)]),
            ),
            stretched(
                &["rope_parameters.high_freq_factor", "rope_scaling.high_freq_factor"],
                &KeyMeaning::Stated(&[Plain::Real(4.0)]),
            ),
            same(&["num_key_value_heads"], "model.kv_heads", Plain::Null),
            THETA,
            HEAD_DIM,
            EPS,
            NO_BIAS,
            same(&["intermediate_size"], "model.d_ff", Plain::Required),
            only(&["mlp_bias"], &[Plain::Bool(false)]),
            // How a product is computed, and of pretraining.
            key(&["pretraining_tp"], KeyMeaning::Free(Some(Plain::Whole(1)))),
        ],
    ],
    recipe: &[],
    layers: None,
    map: &[REST],
    prefix: None,
    twins: TIED,
    idle: IDLE,
};

/// On disk every expert has tensors of its own. In memory, and in files that are written from there as they are, those of a
/// layer are stacked, gate and up behind one another.
pub(in crate::convert) const MIXTRAL: ForeignFamily = ForeignFamily {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    family: "mixtral",
    keys: &[
        OF_ALL,
        &[
            ROPE,
            KV_HEADS,
            same(&["rope_parameters.rope_theta", "rope_theta"], "model.rope_theta", Plain::Real(1e6)),
            HEAD_DIM,
            same(&["rms_norm_eps"], "model.norm_eps", Plain::Real(1e-5)),
            only(&["sliding_window"], &[Plain::Null]),
            same(&["intermediate_size"], "moe.d_expert", Plain::Required),
            same(&["num_local_experts", "num_experts"], "moe.experts", Plain::Required),
            TOP_K,
            BALANCE,
            training(&["router_jitter_noise"], Plain::Real(0.0)),
        ],
    ],
    recipe: &[("moe.dialect", Plain::Text("hf"))],
    layers: Some(LayerKeys::All),
    map: &[
        MapRule {
            here: "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
            there: &[
                whole("model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight"),
                whole("model.layers.{i}.mlp.experts.gate_up_proj").stacked().part(0, 2),
                whole("model.layers.{i}.block_sparse_moe.experts.gate_up_proj").stacked().part(0, 2),
            ],
        },
        MapRule {
            here: "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
            there: &[
                whole("model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight"),
                whole("model.layers.{i}.mlp.experts.gate_up_proj").stacked().part(1, 2),
                whole("model.layers.{i}.block_sparse_moe.experts.gate_up_proj").stacked().part(1, 2),
            ],
        },
        MapRule {
            here: "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
            there: &[
                whole("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight"),
                whole("model.layers.{i}.mlp.experts.down_proj").stacked(),
                whole("model.layers.{i}.block_sparse_moe.experts.down_proj").stacked(),
            ],
        },
        MapRule {
            here: "model.layers.{i}.block_sparse_moe.gate.weight",
            there: &[whole("model.layers.{i}.block_sparse_moe.gate.weight"), whole("model.layers.{i}.mlp.gate.weight")],
        },
        REST,
    ],
    prefix: None,
    twins: TIED,
    idle: IDLE,
};

/// Experts of Qwen's kind have the names of a dense feed-forward's products.
pub(super) const QWEN_GATE: MapRule = MapRule {
    here: "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
    there: &[
        whole("model.layers.{i}.mlp.experts.{e}.gate_proj.weight"),
        whole("model.layers.{i}.mlp.experts.gate_up_proj").stacked().part(0, 2),
    ],
};
pub(super) const QWEN_UP: MapRule = MapRule {
    here: "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
    there: &[
        whole("model.layers.{i}.mlp.experts.{e}.up_proj.weight"),
        whole("model.layers.{i}.mlp.experts.gate_up_proj").stacked().part(1, 2),
    ],
};
pub(super) const QWEN_DOWN: MapRule = MapRule {
    here: "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
    there: &[
        whole("model.layers.{i}.mlp.experts.{e}.down_proj.weight"),
        whole("model.layers.{i}.mlp.experts.down_proj").stacked(),
    ],
};
pub(super) const QWEN_ROUTER: MapRule = MapRule {
    here: "model.layers.{i}.block_sparse_moe.gate.weight",
    there: &[whole("model.layers.{i}.mlp.gate.weight")],
};
const QWEN_EXPERTS: &[MapRule] = &[QWEN_GATE, QWEN_UP, QWEN_DOWN, QWEN_ROUTER, REST];

pub(in crate::convert) const OLMOE: ForeignFamily = ForeignFamily {
    model_type: "olmoe",
    architecture: "OlmoeForCausalLM",
    family: "olmoe",
    keys: &[
        OF_ALL,
        &[
            ROPE,
            same(&["num_key_value_heads"], "model.kv_heads", Plain::Null),
            THETA,
            HEAD_DIM,
            same(&["rms_norm_eps"], "model.norm_eps", Plain::Real(1e-5)),
            NO_BIAS,
            // Queries, keys and values are not cut off.
            only(&["clip_qkv"], &[Plain::Null]),
            same(&["intermediate_size"], "moe.d_expert", Plain::Required),
            same(&["num_experts", "num_local_experts"], "moe.experts", Plain::Required),
            TOP_K,
            same(&["router_aux_loss_coef"], "moe.balance_weight", Plain::Real(0.01)),
            key(&["norm_topk_prob"], KeyMeaning::SumToOne(false)),
        ],
    ],
    recipe: &[],
    layers: Some(LayerKeys::All),
    map: QWEN_EXPERTS,
    prefix: None,
    twins: TIED,
    idle: IDLE,
};

pub(in crate::convert) const QWEN2_MOE: ForeignFamily = ForeignFamily {
    model_type: "qwen2_moe",
    architecture: "Qwen2MoeForCausalLM",
    family: "qwen2_moe",
    keys: &[
        OF_ALL,
        &[
            ROPE,
            KV_HEADS,
            THETA,
            HEAD_DIM,
            EPS,
            only(&["qkv_bias"], &[Plain::Bool(true)]),
            NO_WINDOW,
            OF_WINDOWS,
            key(&["layer_types"], KeyMeaning::Windows),
            same(&["intermediate_size"], "model.d_ff", Plain::Required),
            same(&["moe_intermediate_size"], "moe.d_expert", Plain::Required),
            key(&["shared_expert_intermediate_size"], KeyMeaning::Times("moe.shared_experts", "moe_intermediate_size")),
            same(&["num_experts", "num_local_experts"], "moe.experts", Plain::Required),
            TOP_K,
            BALANCE,
            key(&["norm_topk_prob"], KeyMeaning::SumToOne(false)),
            key(&["decoder_sparse_step", "mlp_only_layers"], KeyMeaning::Layers),
        ],
    ],
    recipe: &[],
    layers: Some(LayerKeys::StepAndDense),
    map: &[
        QWEN_GATE,
        QWEN_UP,
        QWEN_DOWN,
        QWEN_ROUTER,
        MapRule {
            here: "model.layers.{i}.block_sparse_moe.shared_experts.0.w1.weight",
            there: &[whole("model.layers.{i}.mlp.shared_expert.gate_proj.weight")],
        },
        MapRule {
            here: "model.layers.{i}.block_sparse_moe.shared_experts.0.w3.weight",
            there: &[whole("model.layers.{i}.mlp.shared_expert.up_proj.weight")],
        },
        MapRule {
            here: "model.layers.{i}.block_sparse_moe.shared_experts.0.w2.weight",
            there: &[whole("model.layers.{i}.mlp.shared_expert.down_proj.weight")],
        },
        MapRule {
            here: "model.layers.{i}.block_sparse_moe.shared_expert_gate.weight",
            there: &[whole("model.layers.{i}.mlp.shared_expert_gate.weight")],
        },
        REST,
    ],
    prefix: None,
    twins: TIED,
    idle: IDLE,
};

pub(in crate::convert) const QWEN3_MOE: ForeignFamily = ForeignFamily {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    family: "qwen3_moe",
    keys: &[
        OF_ALL,
        &[
            ROPE,
            KV_HEADS,
            THETA,
            key(&["head_dim"], KeyMeaning::OwnHeadDim(None)),
            EPS,
            NO_BIAS,
            NO_WINDOW,
            OF_WINDOWS,
            same(&["intermediate_size"], "model.d_ff", Plain::Required),
            same(&["moe_intermediate_size"], "moe.d_expert", Plain::Required),
            same(&["num_experts", "num_local_experts"], "moe.experts", Plain::Required),
            TOP_K,
            BALANCE,
            key(&["norm_topk_prob"], KeyMeaning::SumToOne(false)),
            key(&["decoder_sparse_step", "mlp_only_layers"], KeyMeaning::Layers),
        ],
    ],
    recipe: &[],
    layers: Some(LayerKeys::StepAndDense),
    map: QWEN_EXPERTS,
    prefix: None,
    twins: TIED,
    idle: IDLE,
};
