"""golden/mixtral.safetensors: transformers' Mixtral (its own auxiliary loss is not used)."""
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import plain
from common import D, EXPERTS, S, TOP_K, V, make

INNER = 40


def gpt_oss(out, at, mlp, read):
    """Whose experts have rows of gates and ups in turn, and [in,out]."""
    out[at + ".gate.weight"], out[at + ".gate.bias"] = read(mlp.router.weight), read(mlp.router.bias)
    experts = mlp.experts
    for e in range(EXPERTS):
        x, first, bias = f"{at}.experts.{e}", read(experts.gate_up_proj)[e].T, read(experts.gate_up_proj_bias)[e]
        for part, name in enumerate(("w1", "w3")):
            out[f"{x}.{name}.weight"], out[f"{x}.{name}.bias"] = first[part::2], bias[part::2]
        out[x + ".w2.weight"], out[x + ".w2.bias"] = read(experts.down_proj)[e].T, read(experts.down_proj_bias)[e]


def names(model, read):
    m = model.model
    out = {"model.embed_tokens.weight": read(m.embed_tokens.weight)}
    for i, layer in enumerate(m.layers):
        at = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}.{norm}.weight"] = read(getattr(layer, norm).weight)
        for x in "qk" if hasattr(layer.self_attn, "q_norm") else "":
            out[f"{at}.self_attn.{x}_norm.weight"] = read(getattr(layer.self_attn, x + "_norm").weight)
        for x in "qkvo":
            proj = getattr(layer.self_attn, x + "_proj")
            out[f"{at}.self_attn.{x}_proj.weight"] = read(proj.weight)
            if proj.bias is not None:
                out[f"{at}.self_attn.{x}_proj.bias"] = read(proj.bias)
        if hasattr(layer.self_attn, "sinks"):
            out[at + ".self_attn.sinks"] = read(layer.self_attn.sinks)
        if hasattr(layer.mlp, "router"):
            gpt_oss(out, at + ".block_sparse_moe", layer.mlp, read)
            continue
        out[at + ".block_sparse_moe.gate.weight"] = read(layer.mlp.gate.weight)
        gate_up, down = read(layer.mlp.experts.gate_up_proj), read(layer.mlp.experts.down_proj)
        for e in range(EXPERTS):
            x = f"{at}.block_sparse_moe.experts.{e}"
            out[x + ".w1.weight"] = gate_up[e, :INNER]
            out[x + ".w3.weight"] = gate_up[e, INNER:]
            out[x + ".w2.weight"] = down[e]
        if hasattr(layer.mlp, "shared_expert"):
            out[at + ".block_sparse_moe.shared_expert_gate.weight"] = read(layer.mlp.shared_expert_gate.weight)
            for ours, theirs in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
                proj = getattr(layer.mlp.shared_expert, theirs + "_proj")
                out[f"{at}.block_sparse_moe.shared_experts.0.{ours}.weight"] = read(proj.weight)
    out["model.norm.weight"] = read(m.norm.weight)
    out["lm_head.weight"] = read(model.lm_head.weight)
    return out


def build():
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=V, hidden_size=D, intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K, max_position_embeddings=S, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, hidden_act="silu",
        sliding_window=None, attention_dropout=0.0, router_jitter_noise=0.0,
        tie_word_embeddings=False, attn_implementation="eager", experts_implementation="eager",
        bos_token_id=0, eos_token_id=0)).float().train()

    def forward(tokens):
        out = model(tokens, use_cache=False, output_router_logits=True)
        assert len(out.router_logits) == 2 and all(r.requires_grad for r in out.router_logits)
        return out.logits, list(out.router_logits)

    return (model, forward, lambda read: names(model, read),
            lambda w, x: plain.forward(w, x, 4, 2))


@torch.no_grad()
def check_moe():
    """Hugging Face's MoE layer against one token at a time by hand, from the renamed weights."""
    model, _, named, _ = build()
    torch.manual_seed(5)
    for p in model.parameters():
        p.normal_(0, 0.5)
    x = torch.randn(7, D)
    theirs = model.model.layers[1].mlp(x[None])[0]
    w = named(lambda p: p.detach())
    at = "model.layers.1.block_sparse_moe"
    for t in range(len(x)):
        p = (w[at + ".gate.weight"] @ x[t]).softmax(0)
        best = p.argsort(descending=True)[:TOP_K].tolist()
        y = torch.zeros(D)
        for e in best:
            gate = w[f"{at}.experts.{e}.w1.weight"] @ x[t]
            up = w[f"{at}.experts.{e}.w3.weight"] @ x[t]
            y += p[e] / p[best].sum() * (w[f"{at}.experts.{e}.w2.weight"] @ (gate * gate.sigmoid() * up))
        torch.testing.assert_close(y, theirs[t], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain.moe(w, at, x)[0], theirs, rtol=1e-5, atol=1e-5)
    print("mixtral: the MoE layer by hand equals transformers'")


if __name__ == "__main__":
    check_moe()
    make("mixtral.safetensors", 661, build)
