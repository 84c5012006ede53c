"""golden/deepseek_v3.safetensors and golden/deepseek_v3_straight.safetensors: transformers' DeepSeek-V3.

The first has queries from a narrow vector, YaRN, a dense layer at the bottom and, above it, experts in groups whose weights
are normalised. The second has queries from the stream, plain positions, experts in both layers, in one group, whose weights
are not. Both have biases of choice, which nobody learns here, and two shared experts."""
import math

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import plain
from common import D, S, V, make

HEADS, CONTENT, ROTARY, VALUE, KV_RANK, QUERY_RANK = 4, 6, 8, 5, 10, 12
EXPERTS, TOP_K, INNER, SHARED = 8, 3, 16, 2
FACTOR, PRETRAINED, THETA = 4.0, 64, 10000.0
BIAS = [0.2, -0.1, 0.05, -0.2, 0.1, 0.0, -0.15, 0.25]


class Sigmoid:
    experts, top_k = EXPERTS, TOP_K

    def __init__(self, groups, top_groups):
        self.groups, self.top_groups = groups, top_groups

    def route(self, router_logits):
        score = router_logits.sigmoid()
        by = score + torch.tensor(BIAS, dtype=score.dtype)
        gap = 1.0
        if self.groups > 1:
            groups = by.reshape(len(by), self.groups, -1)
            of_group = groups.sort(-1, descending=True).values[..., :2].sum(-1)
            best = of_group.sort(-1, descending=True)
            gap = (best.values[:, self.top_groups - 1] - best.values[:, self.top_groups]).min().item()
            out = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best.indices[:, :self.top_groups], False)
            by = groups.masked_fill(out[..., None], -9.0).reshape(by.shape)
        best = by.sort(-1, descending=True)
        gap = min(gap, (best.values[:, TOP_K - 1] - best.values[:, TOP_K]).min().item())
        return score / score.sum(-1, keepdim=True), best.indices[:, :TOP_K], gap

    def of_token(self, x):
        score = [1 / (1 + math.exp(-one)) for one in x]
        by = {e: score[e] + BIAS[e] for e in range(EXPERTS)}
        size = EXPERTS // self.groups
        of_group = lambda g: sum(sorted(by[e] for e in range(g * size, (g + 1) * size))[-2:])
        best = sorted(range(self.groups), key=of_group)[-self.top_groups:]
        allowed = [e for e in by if e // size in best]
        return [one / sum(score) for one in score], sorted(allowed, key=by.get)[-TOP_K:]


def scale(straight):
    return 1.0 if straight else 2.5


def config(straight):
    rope = {"rope_type": "default", "rope_theta": THETA} if straight else {
        "rope_type": "yarn", "rope_theta": THETA, "factor": FACTOR, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": PRETRAINED}
    return DeepseekV3Config(
        vocab_size=V, hidden_size=D, intermediate_size=4 * D, moe_intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, n_shared_experts=SHARED, n_routed_experts=EXPERTS,
        routed_scaling_factor=scale(straight), kv_lora_rank=KV_RANK, q_lora_rank=None if straight else QUERY_RANK,
        qk_rope_head_dim=ROTARY, v_head_dim=VALUE, qk_nope_head_dim=CONTENT, n_group=1 if straight else 4,
        topk_group=1 if straight else 2, num_experts_per_tok=TOP_K, first_k_dense_replace=0 if straight else 1,
        norm_topk_prob=not straight, max_position_embeddings=S if straight else int(FACTOR * PRETRAINED),
        rms_norm_eps=1e-5, rope_parameters=rope, tie_word_embeddings=False, num_nextn_predict_layers=0,
        attn_implementation="eager", experts_implementation="eager", pad_token_id=None, bos_token_id=None,
        eos_token_id=None)


def names(model, read):
    m = model.model
    out = {"model.embed_tokens.weight": read(m.embed_tokens.weight), "model.norm.weight": read(m.norm.weight),
           "lm_head.weight": read(model.lm_head.weight)}
    parts = (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    for i, layer in enumerate(m.layers):
        at = f"model.layers.{i}"
        for name, p in layer.named_parameters():
            if not name.startswith("mlp.") or hasattr(layer.mlp, "gate_proj"):
                out[f"{at}.{name}"] = read(p)
        if hasattr(layer.mlp, "gate_proj"):
            continue
        at += ".block_sparse_moe"
        out[at + ".gate.weight"] = read(layer.mlp.gate.weight)
        gate_up, down = read(layer.mlp.experts.gate_up_proj), read(layer.mlp.experts.down_proj)
        for e in range(EXPERTS):
            three = gate_up[e, :INNER], gate_up[e, INNER:], down[e]
            out.update({f"{at}.experts.{e}.{part}.weight": value for part, value in zip(("w1", "w3", "w2"), three)})
        for ours, theirs in parts:
            proj = getattr(layer.mlp.shared_experts, theirs + "_proj")
            out[f"{at}.shared_experts.0.{ours}.weight"] = read(proj.weight)
    return out


def norm(w, name, x):
    """Within attention, with an epsilon of its own."""
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[name + ".weight"]


def turn(x, straight):
    """x [B,S,H,ROTARY]; neighbours turn together, with YaRN those that are slow more slowly, cut at whole pairs."""
    i = torch.arange(ROTARY // 2, dtype=x.dtype)
    speed = THETA ** (-2 * i / ROTARY)
    if not straight:
        pair = lambda turns: ROTARY * math.log(PRETRAINED / (turns * 2 * math.pi)) / (2 * math.log(THETA))
        low, high = max(math.floor(pair(32.0)), 0), min(math.ceil(pair(1.0)), ROTARY - 1)
        slow = ((i - low) / (high - low)).clamp(0, 1)
        assert 0 < slow[1] < 1
        speed = speed / FACTOR * slow + speed * (1 - slow)
    angle = (torch.arange(x.shape[1], dtype=x.dtype)[:, None] * speed)[None, :, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).flatten(-2)


def attention(w, at, x, straight):
    b, s, _ = x.shape
    lin = lambda part, x: plain.linear(w, f"{at}.{part}", x)
    q = lin("q_proj", x) if straight else lin("q_b_proj", norm(w, at + ".q_a_layernorm", lin("q_a_proj", x)))
    q = q.reshape(b, s, HEADS, CONTENT + ROTARY)
    narrow = lin("kv_a_proj_with_mqa", x)
    both = lin("kv_b_proj", norm(w, at + ".kv_a_layernorm", narrow[..., :KV_RANK])).reshape(b, s, HEADS, -1)
    shared = turn(narrow[..., None, KV_RANK:], straight).expand(b, s, HEADS, ROTARY)
    q = torch.cat([q[..., :CONTENT], turn(q[..., CONTENT:], straight)], -1)
    k, v = torch.cat([both[..., :CONTENT], shared], -1), both[..., CONTENT:]
    sharp = 1 if straight else (0.1 * math.log(FACTOR) + 1) ** 2
    y = plain.attention(q, k, v, scale=sharp * (CONTENT + ROTARY) ** -0.5)
    return lin("o_proj", y.reshape(b, s, -1))


def moe(w, at, x, router, straight):
    logits = plain.linear(w, at + ".gate", x)
    _, index, _ = router.route(logits)
    weight = logits.sigmoid().gather(1, index)
    weight = scale(straight) * (weight if straight else weight / (weight.sum(-1, keepdim=True) + 1e-20))
    y = plain.expert(w, at + ".shared_experts.0", x)
    for e in range(EXPERTS):
        share = sum(weight[:, j] * (index[:, j] == e) for j in range(TOP_K))
        y = y + share[:, None] * plain.expert(w, f"{at}.experts.{e}", x)
    return y, logits


def forward(w, tokens, router, straight):
    x, router_logits = w["model.embed_tokens.weight"][tokens], []
    for i in range(2):
        at = f"model.layers.{i}"
        x = x + attention(w, at + ".self_attn", plain.norm(w, at + ".input_layernorm", x), straight)
        h = plain.norm(w, at + ".post_attention_layernorm", x)
        if at + ".mlp.gate_proj.weight" in w:
            x = x + plain.expert(w, at + ".mlp", h)
            continue
        y, logits = moe(w, at + ".block_sparse_moe", h.reshape(-1, D), router, straight)
        x, router_logits = x + y.reshape(x.shape), router_logits + [logits]
    return plain.norm(w, "model.norm", x) @ w["lm_head.weight"].T, router_logits


def main(file, seed, straight):
    router = Sigmoid(1, 1) if straight else Sigmoid(4, 2)
    layers = range(0 if straight else 1, 2)

    def build():
        model = DeepseekV3ForCausalLM(config(straight)).float().train()
        for layer in layers:
            model.model.layers[layer].mlp.gate.e_score_correction_bias.copy_(torch.tensor(BIAS))

        def run(tokens):
            out = model(tokens, use_cache=False, output_router_logits=True)
            logits = [one.reshape(-1, EXPERTS) for one in out.router_logits]
            assert len(logits) == len(layers) and all(r.requires_grad for r in logits)
            return out.logits, logits

        return model, run, lambda read: names(model, read), lambda w, x: forward(w, x, router, straight)

    bias = {f"model.layers.{i}.block_sparse_moe.gate.e_score_correction_bias": torch.tensor(BIAS) for i in layers}
    make(file, seed, build, router=router, state=bias)


if __name__ == "__main__":
    main("deepseek_v3.safetensors", 1, False)
    main("deepseek_v3_straight.safetensors", 27, True)
