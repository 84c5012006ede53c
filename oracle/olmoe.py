"""golden/olmoe.safetensors: transformers' OLMoE, queries and keys of all heads normed together, weights of experts as
they come out of the softmax (its own auxiliary loss is not used)."""
from transformers import OlmoeConfig, OlmoeForCausalLM

import plain
from common import D, EXPERTS, S, TOP_K, V, batches_of_all, make
from mixtral import INNER, names

HEADS = 4


def build():
    model = OlmoeForCausalLM(OlmoeConfig(
        vocab_size=V, hidden_size=D, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=False,
        max_position_embeddings=S, rms_norm_eps=1e-5, attention_bias=False, clip_qkv=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, hidden_act="silu",
        tie_word_embeddings=False, attn_implementation="eager", experts_implementation="eager",
        pad_token_id=None, bos_token_id=None, eos_token_id=None)).float().train()

    def forward(tokens):
        out = model(tokens, use_cache=False, output_router_logits=True)
        assert len(out.router_logits) == 2 and all(r.requires_grad for r in out.router_logits)
        return out.logits, list(out.router_logits)

    return (model, forward, lambda read: names(model, read), lambda w, x: plain.forward(w, x, HEADS, HEADS, False))


if __name__ == "__main__":
    make("olmoe.safetensors", 226, build, batches_of_all)
