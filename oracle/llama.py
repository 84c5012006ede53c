"""golden/llama.safetensors and golden/llama_stretched.safetensors: transformers' Llama, tied head, dense; the second with
positions stretched as in Llama 3.1."""
import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import plain
from common import D, S, V, make


def names(model, read):
    """Our names are Hugging Face's; the tied head has none of its own."""
    return {name: read(p) for name, p in model.named_parameters()}


HEADS, THETA = 4, 10000.0
# Of three pairs the first turns often in 256 tokens, the second twice, the third hardly.
FACTOR, PRETRAINED, LOW, HIGH = 8.0, 256, 1.0, 4.0
STRAIGHT = {"rope_type": "default", "rope_theta": THETA}
STRETCHED = {"rope_type": "llama3", "rope_theta": THETA, "factor": FACTOR, "low_freq_factor": LOW,
             "high_freq_factor": HIGH, "original_max_position_embeddings": PRETRAINED}


def stretched(x, positions):
    """Pair by pair, from the number of its turns."""
    speeds = []
    for i in range(x.shape[-1] // 2):
        speed = THETA ** (-2 * i / x.shape[-1])
        turns = PRETRAINED * speed / (2 * math.pi)
        kept = min(max((turns - LOW) / (HIGH - LOW), 0), 1)
        speeds.append(kept * speed + (1 - kept) * speed / FACTOR)
    angle = (positions.to(x.dtype)[..., None] * torch.tensor(speeds, dtype=x.dtype))[:, :, None, :]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def build(rope=STRAIGHT, seq=S, turn=plain.rotary):
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=4 * D, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=seq, rms_norm_eps=1e-5, rope_parameters=rope,
        tie_word_embeddings=True, attention_bias=False, mlp_bias=False, attn_implementation="eager",
        pad_token_id=None, bos_token_id=None, eos_token_id=None)).float().train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return (model, lambda tokens: (model(tokens, use_cache=False).logits, []),
            lambda read: names(model, read), lambda w, x: plain.forward(w, x, HEADS, 2, turn=turn))


if __name__ == "__main__":
    make("llama.safetensors", 40, build)
    make("llama_stretched.safetensors", 40, lambda: build(STRETCHED, int(FACTOR) * PRETRAINED, stretched))
