"""The two model families written out by hand over a dict of weights in Guildhall's names.
Used to check the goldens (in float64), which also proves the renaming and the transposes."""
import torch
import torch.nn.functional as F

from common import EXPERTS, TOP_K, route


def linear(w, name, x):
    y = x @ w[name + ".weight"].T
    return y + w[name + ".bias"] if name + ".bias" in w else y


def norm(w, name, x):
    if name + ".bias" in w:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[name + ".weight"]
    return y + w[name + ".bias"] if name + ".bias" in w else y


def gelu(x):
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + torch.exp(-x))


def rotary(x, positions, theta=10000.0):
    """x [B,S,H,hd], positions [B,S]; rotates (first half, second half) pairs"""
    half = x.shape[-1] // 2
    freq = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = (positions.to(x.dtype)[..., None] * freq)[:, :, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attention(q, k, v, segments=None):
    """q [B,S,H,hd], k and v [B,S,KV,hd]; causal, within a segment; head h reads kv head h // (H/KV)"""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    score = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    s = q.shape[1]
    see = torch.arange(s)[:, None] >= torch.arange(s)[None, :]
    see = see.expand(q.shape[0], s, s)
    if segments is not None:
        see = see & (segments[:, :, None] == segments[:, None, :])
    score = score.masked_fill(~see[:, None], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", score.softmax(-1), v)


def expert(w, name, x):
    if name + ".w1.weight" in w:
        return linear(w, name + ".w2", silu(linear(w, name + ".w1", x)) * linear(w, name + ".w3", x))
    return linear(w, name + ".fc_out", gelu(linear(w, name + ".fc_in", x)))


def moe(w, name, x):
    """x [T,D] -> y [T,D], router logits [T,E]; every expert runs on every token, unused ones weigh 0"""
    logits = linear(w, name + ".gate", x)
    _, index, weight, _ = route(logits)
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        share = sum(weight[:, j] * (index[:, j] == e) for j in range(TOP_K))
        y = y + share[:, None] * expert(w, f"{name}.experts.{e}", x)
    return y, logits


def forward(w, tokens, heads, kv_heads):
    x = w["model.embed_tokens.weight"][tokens]
    b, s, d = x.shape
    positions = torch.arange(s).expand(b, s)
    learned = "model.embed_positions.weight" in w
    if learned:
        x = x + w["model.embed_positions.weight"][positions]
    router_logits = []
    for i in range(2):
        at = f"model.layers.{i}"
        h = norm(w, at + ".input_layernorm", x)
        q = linear(w, at + ".self_attn.q_proj", h).reshape(b, s, heads, -1)
        k = linear(w, at + ".self_attn.k_proj", h).reshape(b, s, kv_heads, -1)
        v = linear(w, at + ".self_attn.v_proj", h).reshape(b, s, kv_heads, -1)
        if not learned:
            q, k = rotary(q, positions), rotary(k, positions)
        x = x + linear(w, at + ".self_attn.o_proj", attention(q, k, v).reshape(b, s, d))
        h = norm(w, at + ".post_attention_layernorm", x)
        if at + ".block_sparse_moe.gate.weight" in w:
            y, logits = moe(w, at + ".block_sparse_moe", h.reshape(-1, d))
            router_logits.append(logits)
            x = x + y.reshape(b, s, d)
        else:
            x = x + expert(w, at + ".mlp", h)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(w, "model.norm", x) @ head.T, router_logits
