"""golden/gpt_oss.safetensors: transformers' GPT-OSS: sinks, a window in the first of two layers, YaRN, biases everywhere
but on the head, clamped gates."""
import math

import torch
from transformers import GptOssConfig, GptOssForCausalLM

import plain
from common import D, EXPERTS, S, TOP_K, V, make
from mixtral import INNER, names

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 4, 2, 8, 5
FACTOR, PRETRAINED, THETA = 4.0, 8, 10000.0


def build():
    model = GptOssForCausalLM(GptOssConfig(
        vocab_size=V, hidden_size=D, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K,
        sliding_window=WINDOW, max_position_embeddings=int(FACTOR * PRETRAINED), rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "yarn", "rope_theta": THETA, "factor": FACTOR, "beta_fast": 32.0,
                         "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": PRETRAINED},
        tie_word_embeddings=False, attn_implementation="eager", experts_implementation="eager")).float().train()
    for layer in model.model.layers:
        for bias in (layer.mlp.experts.gate_up_proj_bias, layer.mlp.experts.down_proj_bias):
            bias.is_bias = True

    def forward(tokens):
        out = model(tokens, use_cache=False, output_router_logits=True)
        assert len(out.router_logits) == 2 and all(r.requires_grad for r in out.router_logits)
        return out.logits, list(out.router_logits)

    return (model, forward, lambda read: names(model, read),
            lambda w, x: plain.forward(w, x, HEADS, KV_HEADS, turn=yarn, windows=(WINDOW, None)))


def yarn(x, positions):
    """Pairs that turn more than 32 times in PRETRAINED tokens as ever, those that turn less than once slower by FACTOR."""
    pair = lambda turns: HEAD_DIM * math.log(PRETRAINED / (turns * 2 * math.pi)) / (2 * math.log(THETA))
    low, high = max(pair(32.0), 0.0), min(pair(1.0), HEAD_DIM - 1.0)
    i = torch.arange(HEAD_DIM // 2, dtype=x.dtype)
    slow = ((i - low) / (high - low)).clamp(0, 1)
    speed = THETA ** (-2 * i / HEAD_DIM)
    angle = positions.to(x.dtype)[..., None] * (speed / FACTOR * slow + speed * (1 - slow))
    angle, grown = angle[:, :, None, :], 0.1 * math.log(FACTOR) + 1
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1) * grown


if __name__ == "__main__":
    make("gpt_oss.safetensors", 76, build)
