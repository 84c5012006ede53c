//! DeepSeek-V3: attention has the same names; experts have those of Qwen's kind, and beside them stands one network.

use super::ForeignFamily;
use super::llama::{
    DROPOUT, EPS, HEADS, IDLE, LAYERS, NO_BIAS, NO_SCALING, PAD, QWEN_DOWN, QWEN_GATE, QWEN_ROUTER, QWEN_UP, REST,
    ROPE_TYPES, SEQ, SILU, STD, STRETCH, STRETCHED_FROM, THETA, TIE, TIED, TOP_K, VOCAB, WIDTH,
};
use crate::convert::keys::{ForeignKey, KeyMeaning, Plain, free, key, only, same, stretched, training};
use crate::convert::map::{MapRule, whole};
use crate::convert::moe_layers::LayerKeys;

/// Of the angles, which are YaRN's or plain.
const POSITIONS: &[ForeignKey] = &[
    THETA,
    NO_SCALING,
    key(ROPE_TYPES, KeyMeaning::Stretch("yarn", Plain::Real(1.0))),
    STRETCH,
    STRETCHED_FROM,
    stretched(&["rope_parameters.beta_fast", "rope_scaling.beta_fast"], &KeyMeaning::Only(&[Plain::Real(32.0)])),
    stretched(&["rope_parameters.beta_slow", "rope_scaling.beta_slow"], &KeyMeaning::Only(&[Plain::Real(1.0)])),
    stretched(&["rope_parameters.truncate", "rope_scaling.truncate"], &KeyMeaning::Only(&[Plain::Bool(true)])),
    // As one says, scores are sharpened, and as the other does, what turns is not.
    stretched(&["rope_parameters.mscale", "rope_scaling.mscale"], &KeyMeaning::Stated(&[Plain::Real(1.0)])),
    stretched(
        &["rope_parameters.mscale_all_dim", "rope_scaling.mscale_all_dim"],
        &KeyMeaning::Stated(&[Plain::Real(1.0)]),
    ),
    only(&["rope_interleave"], &[Plain::Bool(true)]),
];

const ATTENTION: &[ForeignKey] = &[
    HEADS,
    same(&["num_key_value_heads"], "model.kv_heads", Plain::Null),
    // Null where queries come from the residual stream.
    key(&["q_lora_rank"], KeyMeaning::OrNone("model.query_rank")),
    same(&["kv_lora_rank"], "model.kv_rank", Plain::Required),
    same(&["qk_nope_head_dim"], "model.content_dim", Plain::Required),
    same(&["qk_rope_head_dim", "head_dim"], "model.rotary_dim", Plain::Required),
    key(&["qk_head_dim"], KeyMeaning::HeadDim),
    same(&["v_head_dim"], "model.value_dim", Plain::Required),
    NO_BIAS,
    DROPOUT,
];

const EXPERTS: &[ForeignKey] = &[
    same(&["moe_intermediate_size"], "moe.d_expert", Plain::Required),
    same(&["n_routed_experts", "num_local_experts"], "moe.experts", Plain::Required),
    same(&["n_shared_experts"], "moe.shared_experts", Plain::Whole(1)),
    TOP_K,
    same(&["n_group"], "moe.gate.groups", Plain::Whole(8)),
    same(&["topk_group"], "moe.gate.top_groups", Plain::Whole(4)),
    same(&["routed_scaling_factor"], "moe.gate.route_scale", Plain::Real(2.5)),
    same(&["norm_topk_prob"], "moe.gate.normalised", Plain::Bool(true)),
    only(&["scoring_func"], &[Plain::Text("sigmoid")]),
    only(&["topk_method"], &[Plain::Text("noaux_tc")]),
    only(&["moe_layer_freq"], &[Plain::Whole(1)]),
    key(&["first_k_dense_replace"], KeyMeaning::Layers),
    key(&["num_nextn_predict_layers", "num_mtp_layers"], KeyMeaning::FurtherLayers),
    training(&["aux_loss_alpha"], Plain::Real(0.0)),
    training(&["seq_aux"], Plain::Bool(true)),
];

pub(in crate::convert) const DEEPSEEK_V3: ForeignFamily = ForeignFamily {
    model_type: "deepseek_v3",
    architecture: "DeepseekV3ForCausalLM",
    family: "deepseek_v3",
    keys: &[
        &[
            VOCAB,
            WIDTH,
            LAYERS,
            SEQ,
            EPS,
            STD,
            TIE,
            SILU,
            PAD,
            same(&["intermediate_size"], "model.d_ff", Plain::Required),
            // How products were computed, and of pretraining.
            key(&["pretraining_tp"], KeyMeaning::Free(Some(Plain::Whole(1)))),
            free(&["ep_size"]),
            free(&["auto_map"]),
        ],
        POSITIONS,
        ATTENTION,
        EXPERTS,
    ],
    // There is no loss of loads: biases alone balance experts.
    recipe: &[("moe.gate.kind", Plain::Text("sigmoid")), ("moe.balance_weight", Plain::Real(0.0))],
    layers: Some(LayerKeys::AllButFirst),
    map: &[
        QWEN_GATE,
        QWEN_UP,
        QWEN_DOWN,
        QWEN_ROUTER,
        MapRule {
            here: "model.layers.{i}.block_sparse_moe.gate.e_score_correction_bias",
            there: &[whole("model.layers.{i}.mlp.gate.e_score_correction_bias")],
        },
        MapRule {
            here: "model.layers.{i}.block_sparse_moe.shared_experts.0.w1.weight",
            there: &[whole("model.layers.{i}.mlp.shared_experts.gate_proj.weight")],
        },
        MapRule {
            here: "model.layers.{i}.block_sparse_moe.shared_experts.0.w3.weight",
            there: &[whole("model.layers.{i}.mlp.shared_experts.up_proj.weight")],
        },
        MapRule {
            here: "model.layers.{i}.block_sparse_moe.shared_experts.0.w2.weight",
            there: &[whole("model.layers.{i}.mlp.shared_experts.down_proj.weight")],
        },
        REST,
    ],
    prefix: None,
    twins: TIED,
    idle: IDLE,
};
