"""golden/qwen2_moe.safetensors: transformers' Qwen2 with experts: biases of queries, keys and values, a shared expert
behind a sigmoid, weights of experts as they come out of the softmax (its own auxiliary loss is not used)."""
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import plain
from common import D, EXPERTS, S, TOP_K, V, batches_of_all, make
from mixtral import INNER, names

HEADS, KV_HEADS, SHARED = 4, 2, 2


def build():
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(
        vocab_size=V, hidden_size=D, intermediate_size=4 * D, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=INNER,
        shared_expert_intermediate_size=SHARED * INNER, norm_topk_prob=False, decoder_sparse_step=1,
        mlp_only_layers=[], qkv_bias=True, max_position_embeddings=S, rms_norm_eps=1e-5, use_sliding_window=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, hidden_act="silu",
        tie_word_embeddings=False, attn_implementation="eager", experts_implementation="eager",
        pad_token_id=None, bos_token_id=None, eos_token_id=None)).float().train()

    def forward(tokens):
        out = model(tokens, use_cache=False, output_router_logits=True)
        assert len(out.router_logits) == 2 and all(r.requires_grad for r in out.router_logits)
        return out.logits, list(out.router_logits)

    return (model, forward, lambda read: names(model, read), lambda w, x: plain.forward(w, x, HEADS, KV_HEADS, False))


if __name__ == "__main__":
    make("qwen2_moe.safetensors", 142, build, batches_of_all)
