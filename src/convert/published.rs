//! What published models say in their `config.json`, key by key: each is read, means nothing to a model, or is told.

use serde_json::{Map, Value, json};

use super::Error;
use super::foreign_config::{CONFIG, ForeignConfig};
use crate::config::Config;
use crate::model;
use crate::moe::Weighting;

/// A model, what its file says, and of which of its keys it is told that they are of training elsewhere.
struct PublishedModel {
    name: &'static str,
    says: &'static str,
    told: &'static [&'static str],
}

/// In files of older versions, which have rotary positions in other places than those that are written now.
const PUBLISHED: &[PublishedModel] = &[
    PublishedModel { name: "Mixtral-8x7B-v0.1", says: MIXTRAL, told: &[] },
    PublishedModel { name: "OLMoE-1B-7B-0924", says: OLMOE, told: &[] },
    PublishedModel { name: "Qwen1.5-MoE-A2.7B", says: QWEN1_5_MOE, told: &[] },
    PublishedModel { name: "Qwen2-57B-A14B", says: QWEN2_57B, told: &[] },
    PublishedModel { name: "Qwen3-30B-A3B", says: QWEN3_30B, told: &[] },
    PublishedModel { name: "DeepSeek-V3", says: DEEPSEEK_V3, told: &[] },
    PublishedModel { name: "gpt-oss-20b", says: GPT_OSS, told: &[] },
    PublishedModel { name: "gpt2", says: GPT2, told: &["attn_pdrop"] },
    PublishedModel { name: "Llama-2-7b-hf", says: LLAMA_2, told: &[] },
    PublishedModel { name: "Llama-3.2-1B", says: LLAMA_3_2, told: &[] },
    PublishedModel {
        name: "nllb-moe-54b",
        says: NLLB_MOE,
        told: &["attention_dropout", "normalize_router_prob_before_dropping"],
    },
    PublishedModel {
        name: "m2m100_418M",
        says: M2M100,
        told: &["attention_dropout", "encoder_layerdrop", "decoder_layerdrop"],
    },
    PublishedModel { name: "switch-base-8", says: SWITCH, told: &[] },
];

const MIXTRAL: &str = r#"{
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": true,
    "vocab_size": 32000
}"#;

const OLMOE: &str = r#"{
    "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "clip_qkv": null, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": false,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "output_router_logits": false, "pad_token_id": 1, "rms_norm_eps": 1e-5,
    "rope_scaling": null, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": true, "vocab_size": 50304
}"#;

const QWEN1_5_MOE: &str = r#"{
    "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
    "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": false, "num_attention_heads": 16,
    "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
    "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0", "use_cache": true, "use_sliding_window": false,
    "vocab_size": 151936
}"#;

const QWEN2_57B: &str = r#"{
    "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
    "model_type": "qwen2_moe", "moe_intermediate_size": 2560, "norm_topk_prob": false, "num_attention_heads": 28,
    "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 20480, "sliding_window": 131072, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true, "use_sliding_window": false,
    "vocab_size": 151936
}"#;

const QWEN3_30B: &str = r#"{
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936
}"#;

const DEEPSEEK_V3: &str = r#"{
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
    "use_cache": true, "v_head_dim": 128, "vocab_size": 129280
}"#;

/// With `layer_types`, which alternate.
const GPT_OSS: &str = r#"{
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": true,
    "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
        "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention",
        "sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
        "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention",
        "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false,
    "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                            "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": false},
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false,
    "transformers_version": "4.55.0.dev0", "use_cache": true, "vocab_size": 201088
}"#;

const GPT2: &str = r#"{
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
    "summary_type": "cls_index", "summary_use_proj": true,
    "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257
}"#;

const LLAMA_2: &str = r#"{
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0", "use_cache": true, "vocab_size": 32000
}"#;

const LLAMA_3_2: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256
}"#;

const NLLB_MOE: &str = r#"{
    "activation_dropout": 0.0, "activation_function": "relu", "architectures": ["NllbMoeForConditionalGeneration"],
    "attention_dropout": 0.1, "batch_prioritized_routing": false, "bos_token_id": 0, "d_model": 2048,
    "decoder_attention_heads": 16, "decoder_ffn_dim": 8192, "decoder_layerdrop": 0, "decoder_layers": 24,
    "decoder_sparse_step": 4, "decoder_start_token_id": 2, "dropout": 0.1, "encoder_attention_heads": 16,
    "encoder_ffn_dim": 8192, "encoder_layerdrop": 0, "encoder_layers": 24, "encoder_sparse_step": 4, "eos_token_id": 2,
    "expert_capacity": 64, "init_std": 0.02, "is_encoder_decoder": true, "max_length": 200,
    "max_position_embeddings": 1024, "model_type": "nllb-moe", "moe_eval_capacity_token_fraction": 1.0,
    "moe_token_dropout": 0.2, "normalize_router_prob_before_dropping": true, "num_experts": 128,
    "num_hidden_layers": 24, "output_router_logits": false, "pad_token_id": 1, "router_aux_loss_coef": 0.001,
    "router_bias": false, "router_dtype": "float32", "router_ignore_padding_tokens": false,
    "router_jitter_noise": 0.01, "router_type": "tokens_masked", "router_z_loss_coef": 0.001, "scale_embedding": true,
    "second_expert_policy": "all", "tokenizer_class": "NllbTokenizer", "torch_dtype": "float32",
    "transformers_version": "4.28.0.dev0", "use_cache": true, "vocab_size": 256206
}"#;

const M2M100: &str = r#"{
    "activation_dropout": 0.0, "activation_function": "relu", "architectures": ["M2M100ForConditionalGeneration"],
    "attention_dropout": 0.1, "bos_token_id": 0, "d_model": 1024, "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096, "decoder_layerdrop": 0.05, "decoder_layers": 12, "decoder_start_token_id": 2,
    "dropout": 0.1, "early_stopping": true, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096,
    "encoder_layerdrop": 0.05, "encoder_layers": 12, "eos_token_id": 2, "gradient_checkpointing": false,
    "init_std": 0.02, "is_encoder_decoder": true, "max_length": 200, "max_position_embeddings": 1024,
    "model_type": "m2m_100", "num_beams": 5, "num_hidden_layers": 12, "pad_token_id": 1, "scale_embedding": true,
    "transformers_version": "4.6.0.dev0", "use_cache": true, "vocab_size": 128112
}"#;

const SWITCH: &str = r#"{
    "architectures": ["SwitchTransformersForConditionalGeneration"], "d_ff": 3072, "d_kv": 64, "d_model": 768,
    "decoder_sparse_step": 2, "decoder_start_token_id": 0, "dropout_rate": 0.1, "encoder_sparse_step": 2,
    "eos_token_id": 1, "expert_capacity": 64, "feed_forward_proj": "relu", "initializer_factor": 1.0,
    "is_encoder_decoder": true, "is_gated_act": false, "layer_norm_epsilon": 1e-06,
    "model_type": "switch_transformers", "n_positions": 512, "num_decoder_layers": 12, "num_experts": 8,
    "num_heads": 12, "num_layers": 12, "num_sparse_decoder_layers": 6, "num_sparse_encoder_layers": 6,
    "output_past": true, "pad_token_id": 0, "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32, "router_aux_loss_coef": 0.001, "router_bias": false,
    "router_dtype": "float32", "router_ignore_padding_tokens": false, "router_jitter_noise": 0.01,
    "router_type": "tokens_masked", "router_z_loss_coef": 0.001,
    "task_specific_params": {"summarization": {"early_stopping": true, "length_penalty": 2.0, "num_beams": 4}},
    "torch_dtype": "float32", "transformers_version": "4.25.0.dev0", "use_cache": true, "vocab_size": 32128
}"#;

/// Of another way to score groups and without biases of choice.
const DEEPSEEK_V2_LITE: &str = r#"{
    "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "kv_lora_rank": 512, "model_type": "deepseek_v2",
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": null,
    "scoring_func": "softmax", "topk_method": "greedy", "vocab_size": 102400
}"#;

/// What a file comes to with some of its keys changed, or left out where they are null.
fn read(says: &str, changes: &[(&str, Value)]) -> Result<(Config, Vec<String>), Error> {
    let mut object: Map<String, Value> = serde_json::from_str(says).expect("an object");
    for (key, value) in changes {
        match value {
            Value::Null => drop(object.remove(*key)),
            value => drop(object.insert((*key).to_owned(), value.clone())),
        }
    }
    ForeignConfig::of(object, CONFIG.into()).and_then(|file| file.recipe("bf16", None))
}

fn config(says: &str) -> Config {
    read(says, &[]).unwrap_or_else(|error| panic!("{error}")).0
}

/// Layers, width and heads; tokens of a row; experts, chosen ones, shared ones and layers with them.
type PublishedSizes = ([usize; 5], [usize; 4]);

fn facts(config: &Config) -> PublishedSizes {
    let (model, moe) = (&config.model, config.moe.as_ref());
    let heads = model.blueprint().heads;
    let layers = moe.map_or(0, |moe| (0..model.layers).filter(|&layer| moe.layers.contains(layer)).count());
    let experts = moe.map_or([0; 4], |moe| [moe.experts.smallest(), moe.top_k, moe.shared_experts, layers]);
    ([model.layers, model.d_model, heads.heads, heads.kv_heads, model.seq], experts)
}

#[test]
fn published_models_open() {
    let want: [(&str, PublishedSizes); 13] = [
        ("Mixtral-8x7B-v0.1", ([32, 4096, 32, 8, 32_768], [8, 2, 0, 32])),
        ("OLMoE-1B-7B-0924", ([16, 2048, 16, 16, 4096], [64, 8, 0, 16])),
        ("Qwen1.5-MoE-A2.7B", ([24, 2048, 16, 16, 8192], [60, 4, 4, 24])),
        ("Qwen2-57B-A14B", ([28, 3584, 28, 4, 131_072], [64, 8, 8, 28])),
        ("Qwen3-30B-A3B", ([48, 2048, 32, 4, 40_960], [128, 8, 0, 48])),
        ("DeepSeek-V3", ([61, 7168, 128, 128, 163_840], [256, 8, 1, 58])),
        ("gpt-oss-20b", ([24, 2880, 64, 8, 131_072], [32, 4, 0, 24])),
        ("gpt2", ([12, 768, 12, 12, 1024], [0; 4])),
        ("Llama-2-7b-hf", ([32, 4096, 32, 32, 4096], [0; 4])),
        ("Llama-3.2-1B", ([16, 2048, 32, 8, 131_072], [0; 4])),
        ("nllb-moe-54b", ([48, 2048, 16, 16, 1024], [128, 2, 0, 12])),
        ("m2m100_418M", ([24, 1024, 16, 16, 1024], [0; 4])),
        ("switch-base-8", ([24, 768, 12, 12, 64], [8, 1, 0, 12])),
    ];
    for (PublishedModel { name, says, told }, want) in PUBLISHED.iter().zip(want) {
        let (config, notices) = read(says, &[]).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((*name, facts(&config)), want);
        let mut keys: Vec<&str> = notices.iter().map(|notice| notice.split(' ').next().unwrap_or_default()).collect();
        let mut told = told.to_vec();
        keys.sort_unstable();
        told.sort_unstable();
        assert_eq!(keys, told, "{name}: {notices:?}");
    }
    let refused = read(DEEPSEEK_V2_LITE, &[]).expect_err("there is no such family").to_string();
    assert!(refused.contains("model_type is \"deepseek_v2\"; known are mixtral, llama"), "{refused}");
}

/// What is not a size: positions, weights of experts, windows, jitter, and what is skipped.
#[test]
fn published_models_say_how_they_compute() {
    let weighs = |says: &str| config(says).moe.expect("experts").weighs();
    assert_eq!([weighs(OLMOE), weighs(QWEN1_5_MOE), weighs(QWEN2_57B)], [Weighting::Probability; 3]);
    assert_eq!([weighs(MIXTRAL), weighs(QWEN3_30B)].map(|one| one == Weighting::Probability), [false; 2]);
    assert_eq!(weighs(DEEPSEEK_V3), Weighting::Sigmoid { scale: 2.5, normalised: true });
    let (oss, llama) = (config(GPT_OSS).model, config(LLAMA_3_2).model);
    assert_eq!((oss.rope_factor, oss.rope_pretrained, oss.rope_theta), (Some(32.0), Some(4096), 150_000.0));
    assert_eq!((oss.window, oss.head_dim), (Some(128), Some(64)));
    assert_eq!((llama.rope_factor, llama.rope_pretrained, llama.rope_theta), (Some(32.0), Some(8192), 500_000.0));
    assert_eq!((llama.tie_embeddings, config(LLAMA_2).model.rope_factor), (true, None));
    let masks = |says: &str| config(says).moe.expect("experts").output_masking;
    assert_eq!((masks(NLLB_MOE), masks(SWITCH)), (0.2, 0.0));
    assert_eq!(config(SWITCH).moe.expect("experts").jitter, Some(0.01));
    // What a recipe leaves out is as published.
    let deepseek = config(DEEPSEEK_V3);
    let left_out = model::Config { heads: 128, seq: 163_840, ..model::Config::of(129_280, (7168, 61, 128), 1) };
    let family = toml::Value::from("deepseek_v3").try_into().expect("a family");
    assert_eq!(deepseek.model.blueprint(), model::Config { family, ..left_out }.blueprint());
    let layers = deepseek.moe.expect("experts").layers;
    assert_eq!((layers.contains(2), layers.contains(3)), (false, true));
    // Moonlight's kind: plain positions, queries from the residual stream, one group.
    let mut object: Map<String, Value> = serde_json::from_str(DEEPSEEK_V3).expect("an object");
    let plain =
        [("rope_scaling", Value::Null), ("q_lora_rank", Value::Null), ("n_group", json!(1)), ("topk_group", json!(1))];
    object.extend(plain.map(|(key, value)| (key.to_owned(), value)));
    let (plain, _) = read(&Value::Object(object).to_string(), &[]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((plain.model.rope_factor, plain.model.query_rank), (Some(1.0), Some(0)));
}

/// As the classes of transformers have it that do not know of such a key, and as the one that has a number of its own.
#[test]
fn heads_without_a_width_have_that_of_transformers() {
    let width = |says: &str, changes: &[(&str, Value)]| read(says, changes).map(|(config, _)| config.model.head_dim);
    let none = ("head_dim", Value::Null);
    assert_eq!(width(QWEN3_30B, &[]).ok(), Some(Some(128)));
    assert_eq!(width(QWEN3_30B, std::slice::from_ref(&none)).ok(), Some(Some(64)));
    assert_eq!(width(GPT_OSS, std::slice::from_ref(&none)).ok(), Some(Some(64)));
    let told = QWEN3_30B.replace("\"head_dim\": 128", "\"head_dim\": null");
    assert!(width(&told, &[]).is_err_and(|error| error.to_string().contains("head_dim = null")));
    let error = width(QWEN3_30B, &[none, ("num_attention_heads", Value::Null)]).expect_err("no heads").to_string();
    assert!(error.contains("num_attention_heads is missing"), "{error}");
}
