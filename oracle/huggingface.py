"""golden/huggingface/<family>/: tiny models with random weights as transformers' `save_pretrained` writes them, with a
tokenizer of one word a token, and logits.safetensors: tokens, and what transformers makes of them."""
import json
import os
import shutil
import sys

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV3Config, DeepseekV3ForCausalLM, GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, M2M100Config,
    M2M100ForConditionalGeneration, MixtralConfig, MixtralForCausalLM, NllbMoeConfig, NllbMoeForConditionalGeneration,
    OlmoeConfig, OlmoeForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM,
    SwitchTransformersConfig, SwitchTransformersForConditionalGeneration,
)

from common import GOLDEN

VOCAB, WIDTH, SEQ, SOURCE, ROWS = 32, 16, 12, 8, 2
FIRST = 4  # those before it begin and end texts, or are padding
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PLAIN = dict(
    vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, max_position_embeddings=SEQ, rms_norm_eps=1e-5,
    rope_parameters=ROPE, attn_implementation="eager", bos_token_id=0, eos_token_id=2)
TWO_STACKS = dict(
    vocab_size=VOCAB, d_model=WIDTH, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
    decoder_ffn_dim=24, activation_function="relu", max_position_embeddings=SEQ, dropout=0.0, attention_dropout=0.0,
    activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0, scale_embedding=True,
    attn_implementation="eager", pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)


def mixtral():
    return MixtralForCausalLM(MixtralConfig(
        **PLAIN, intermediate_size=20, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, tie_word_embeddings=False))


def llama():
    return LlamaForCausalLM(LlamaConfig(
        **PLAIN, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))


def llama_stretched():
    """As Llama 3.1; of two pairs the first turns as ever."""
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    return LlamaForCausalLM(LlamaConfig(
        **{**PLAIN, "rope_parameters": rope, "max_position_embeddings": 8192}, intermediate_size=40,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))


def olmoe():
    return OlmoeForCausalLM(OlmoeConfig(
        **PLAIN, intermediate_size=12, num_attention_heads=4, num_key_value_heads=4, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=False, clip_qkv=None, tie_word_embeddings=False, pad_token_id=1))


def qwen2_moe():
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(
        **PLAIN, intermediate_size=40, moe_intermediate_size=12, shared_expert_intermediate_size=24,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False,
        decoder_sparse_step=2, mlp_only_layers=[], qkv_bias=True, use_sliding_window=False, tie_word_embeddings=False))


def qwen3_moe():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **PLAIN, intermediate_size=40, moe_intermediate_size=12, num_attention_heads=2, num_key_value_heads=1,
        head_dim=12, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[0], tie_word_embeddings=False))


def gpt_oss(**sizes):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.5, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 8}
    return GptOssForCausalLM(GptOssConfig(
        **{**PLAIN, "rope_parameters": rope, "intermediate_size": 12, **sizes}, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
        tie_word_embeddings=False))


def deepseek_v3(**sizes):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.5, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8}
    return DeepseekV3ForCausalLM(DeepseekV3Config(
        **{**PLAIN, "rope_parameters": rope, "intermediate_size": 40, "q_lora_rank": 10, "qk_nope_head_dim": 6, **sizes},
        moe_intermediate_size=12, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=5,
        n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True, first_k_dense_replace=1, num_nextn_predict_layers=0,
        tie_word_embeddings=False))


def deepseek_v3_straight():
    """Without a vector for queries, groups, a dense layer and YaRN."""
    return DeepseekV3ForCausalLM(DeepseekV3Config(
        **PLAIN, intermediate_size=40, moe_intermediate_size=12, num_attention_heads=2, num_key_value_heads=2,
        q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=6, v_head_dim=8, n_routed_experts=4,
        n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, routed_scaling_factor=1.5,
        norm_topk_prob=False, first_k_dense_replace=0, num_nextn_predict_layers=0, tie_word_embeddings=False))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=WIDTH, n_layer=2, n_head=2, n_inner=40, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager", bos_token_id=0, eos_token_id=2))


def m2m():
    return M2M100ForConditionalGeneration(M2M100Config(**TWO_STACKS, encoder_layers=2, decoder_layers=1))


def nllb_moe():
    return NllbMoeForConditionalGeneration(NllbMoeConfig(
        **TWO_STACKS, encoder_layers=2, decoder_layers=2, encoder_sparse_step=2, decoder_sparse_step=2, num_experts=4,
        moe_token_dropout=0.2))


def switch():
    return SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=6, d_ff=24, num_layers=2, num_decoder_layers=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_heads=2, num_experts=4, expert_capacity=SEQ,
        router_jitter_noise=0.0, dropout_rate=0.0, tie_word_embeddings=True, attn_implementation="eager",
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2))


def patch(model):
    """NllbMoe of transformers 5.23 takes the table of 0 and 1 that says which expert is a token's first for numbers of
    experts, so that experts 0 and 1 get all tokens. Here every expert gets those that its router sends it, with the
    router's weights, times what transformers multiplies results by in evaluation."""
    def by_numbers(experts, hidden, _, probabilities):
        out = torch.zeros_like(hidden)
        for e in range(experts.num_experts):
            out += probabilities[:, e, None] * experts[f"expert_{e}"](hidden)
        return out * (1 - experts.moe_token_dropout)

    for module in model.modules():
        if type(module).__name__ == "NllbMoeExperts":
            module.forward = by_numbers.__get__(module)


FAMILIES = dict(
    mixtral=mixtral, llama=llama, llama_stretched=llama_stretched, olmoe=olmoe, qwen2_moe=qwen2_moe, qwen3_moe=qwen3_moe, gpt_oss=gpt_oss,
    deepseek_v3=deepseek_v3, deepseek_v3_straight=deepseek_v3_straight, gpt2=gpt2, m2m=m2m, nllb_moe=nllb_moe, switch=switch)


@torch.no_grad()
def redraw(model, rng):
    for name, p in sorted(model.named_parameters()):
        mean, std = (1.0 if "norm" in name or "ln_" in name else 0.0, 0.2) if p.dim() == 1 else (0.0, 0.3)
        mean = 0.0 if name.endswith("bias") else mean
        p.copy_(torch.from_numpy(mean + std * rng.standard_normal(tuple(p.shape))))
    for name, bias in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.from_numpy(0.1 * rng.standard_normal(tuple(bias.shape))))


@torch.no_grad()
def logits(model, tokens):
    """A row of an encoder and a decoder is SOURCE tokens of a source, then those of a target."""
    model.eval()
    if model.config.is_encoder_decoder:
        return model(input_ids=tokens[:, :SOURCE], decoder_input_ids=tokens[:, SOURCE:], use_cache=False).logits
    return model(tokens, use_cache=False).logits


def tokens_of(model, rng):
    length = SEQ + SOURCE * model.config.is_encoder_decoder
    return torch.from_numpy(rng.integers(FIRST, VOCAB, size=(ROWS, length)))


def tokenizer():
    words = ["<s>", "<pad>", "</s>", "<unk>"] + [f"w{n}" for n in range(FIRST, VOCAB)]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(words[:FIRST])
    return made


def save_tokenizer(folder):
    tokenizer().save(os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
        json.dump({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>",
                   "tokenizer_class": "PreTrainedTokenizerFast"}, file, indent=2, sort_keys=True)


def make(family, folder):
    rng = np.random.default_rng(7)
    model = FAMILIES[family]().float()
    redraw(model, rng)
    patch(model)
    tokens = tokens_of(model, rng)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    save_file({"tokens": tokens.int(), "logits": logits(model, tokens).contiguous()},
              os.path.join(folder, "logits.safetensors"))
    print(family, sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)), "bytes")


if __name__ == "__main__":
    for family in sys.argv[1:] or FAMILIES:
        make(family, os.path.join(GOLDEN, "huggingface", family))
