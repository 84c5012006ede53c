"""golden/llama.safetensors: transformers' Llama, tied head, dense."""
from transformers import LlamaConfig, LlamaForCausalLM

import plain
from common import D, S, V, make


def names(model, read):
    """Our names are Hugging Face's; the tied head has none of its own."""
    return {name: read(p) for name, p in model.named_parameters()}


def build():
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=4 * D, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=S, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=True, attention_bias=False, mlp_bias=False, attn_implementation="eager",
        pad_token_id=None, bos_token_id=None, eos_token_id=None)).float().train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return (model, lambda tokens: (model(tokens, use_cache=False).logits, []),
            lambda read: names(model, read), lambda w, x: plain.forward(w, x, 4, 2))


if __name__ == "__main__":
    make("llama.safetensors", 40, build)
