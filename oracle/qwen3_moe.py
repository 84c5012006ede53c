"""golden/qwen3_moe.safetensors: transformers' Qwen3 with experts, heads of their own width, queries and keys normed."""
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import plain
from common import D, EXPERTS, S, TOP_K, V, make
from mixtral import INNER, names

HEADS, KV_HEADS, HEAD_DIM = 2, 1, 128


def build():
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=V, hidden_size=D, intermediate_size=4 * D, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        moe_intermediate_size=INNER, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        max_position_embeddings=S, rms_norm_eps=1e-5, attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, hidden_act="silu", use_sliding_window=False,
        tie_word_embeddings=False, attn_implementation="eager", experts_implementation="eager",
        pad_token_id=None, bos_token_id=None, eos_token_id=None)).float().train()

    def forward(tokens):
        out = model(tokens, use_cache=False, output_router_logits=True)
        assert len(out.router_logits) == 2 and all(r.requires_grad for r in out.router_logits)
        return out.logits, list(out.router_logits)

    return (model, forward, lambda read: names(model, read), lambda w, x: plain.forward(w, x, HEADS, KV_HEADS))


if __name__ == "__main__":
    make("qwen3_moe.safetensors", 559, build)
