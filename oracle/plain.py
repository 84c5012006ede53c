"""The model families written out by hand over a dict of weights in Guildhall's names.
Used to check the goldens (in float64), which also proves the renaming and the transposes."""
import math

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


def attention(q, k, v, segments=None, causal=True, scale=None, bias=None, sinks=None, window=None):
    """q [B,S,H,hd], k and v [B,S,KV,hd], or of another length if not causal; within a segment, and within the last
    `window` tokens; head h reads kv head h // (H/KV). bias [H,S,S] is added to scores; sinks [H] are scores of no value"""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    score = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    score = score if bias is None else score + bias
    s = q.shape[1]
    see = torch.ones(s, k.shape[1], dtype=torch.bool)
    see = see.tril() if causal else see
    see = see if window is None else see & ~see.tril(-window)
    see = see.expand(q.shape[0], *see.shape)
    if segments is not None:
        see = see & (segments[:, :, None] == segments[:, None, :])
    score = score.masked_fill(~see[:, None], float("-inf"))
    if sinks is not None:
        score = torch.cat([score, sinks[None, :, None, None].expand(*score.shape[:3], 1)], -1)
    return torch.einsum("bhij,bjhd->bihd", score.softmax(-1)[..., :k.shape[1]], v)


def expert(w, name, x, activation=gelu):
    if name + ".gate_proj.weight" in w:
        return linear(w, name + ".down_proj", silu(linear(w, name + ".gate_proj", x)) * linear(w, name + ".up_proj", x))
    if name + ".w1.bias" in w:
        gate, up = linear(w, name + ".w1", x).clamp(max=7.0), linear(w, name + ".w3", x).clamp(-7.0, 7.0)
        return linear(w, name + ".w2", gate / (1 + torch.exp(-1.702 * gate)) * (up + 1))
    if name + ".w1.weight" in w:
        return linear(w, name + ".w2", silu(linear(w, name + ".w1", x)) * linear(w, name + ".w3", x))
    return linear(w, name + ".fc_out", activation(linear(w, name + ".fc_in", x)))


def moe(w, name, x, activation=gelu, normalised=True):
    """x [T,D] -> y [T,D], router logits [T,E]; every expert runs on every token, unused ones weigh 0. Weights of the
    chosen are probabilities, if normalised over their sum. A shared expert's share is the sigmoid of a score."""
    logits = linear(w, name + ".gate", x)
    p, index, weight, _ = route(logits)
    weight = weight if normalised else p.gather(-1, index)
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        share = sum(weight[:, j] * (index[:, j] == e) for j in range(TOP_K))
        y = y + share[:, None] * expert(w, f"{name}.experts.{e}", x, activation)
    if name + ".shared_experts.0.w1.weight" in w:
        m = expert(w, name + ".shared_experts.0", x, activation)
        if name + ".shared_expert_gate.weight" in w:
            m = m / (1 + torch.exp(-linear(w, name + ".shared_expert_gate", x)))
        y = y + m
    return y, logits


def feed_forward(w, at, x, activation=gelu, normalised=True):
    """x [B,S,D] -> y [B,S,D], router logits of a MoE layer in a list"""
    if at + ".block_sparse_moe.gate.weight" not in w:
        return expert(w, at + ".mlp", x, activation), []
    y, logits = moe(w, at + ".block_sparse_moe", x.reshape(-1, x.shape[-1]), activation, normalised)
    return y.reshape(x.shape), [logits]


def bert(w, tokens, heads):
    x = w["model.embed_tokens.weight"][tokens] + w["model.embed_positions.weight"][:tokens.shape[1]]
    x = norm(w, "model.layernorm_embedding", x)
    b, s, d = x.shape
    router_logits = []
    for i in range(2):
        at = f"model.layers.{i}"
        q, k, v = (linear(w, f"{at}.self_attn.{n}_proj", x).reshape(b, s, heads, -1) for n in "qkv")
        y = attention(q, k, v, causal=False).reshape(b, s, d)
        x = norm(w, at + ".self_attn_layer_norm", x + linear(w, at + ".self_attn.o_proj", y))
        y, logits = feed_forward(w, at, x)
        x = norm(w, at + ".final_layer_norm", x + y)
        router_logits += logits
    x = norm(w, "lm_head.layer_norm", gelu(linear(w, "lm_head.dense", x)))
    table = w.get("lm_head.decoder.weight", w["model.embed_tokens.weight"])
    return x @ table.T + w["lm_head.bias"], router_logits


def transformer_xl(w, tokens, heads, segment, memory, remembered=None):
    """All pairs of a row at once, under two masks: pairs within a segment, and pairs of a token and its
    memory, whose keys and values come from `remembered`, the inputs of each layer ([B,S,D], constants)."""
    s = tokens.shape[1]
    x = w["model.embed_tokens.weight"][tokens] * w["model.embed_tokens.weight"].shape[1] ** 0.5
    b, _, d = x.shape
    i, j = torch.arange(s)[:, None], torch.arange(s)[None, :]
    begin = i // segment * segment
    own, memory = (j >= begin) & (j <= i), (j < begin) & (j >= begin - memory)
    turns = torch.arange(s, dtype=x.dtype)[:, None] / 10000 ** (torch.arange(0, d, 2, dtype=x.dtype) / d)
    waves = torch.cat([turns.sin(), turns.cos()], -1)
    router_logits, inputs = [], []
    for layer in range(2):
        at = f"model.layers.{layer}"
        inputs.append(x.detach())
        past = inputs[layer] if remembered is None else remembered[layer]
        proj = lambda n, x: linear(w, f"{at}.self_attn.{n}_proj", x).reshape(*x.shape[:-1], heads, -1)
        q, r = proj("q", x), proj("r", waves)[(i - j).clamp(min=0)]
        key = torch.where(own[None, :, :, None, None], proj("k", x)[:, None], proj("k", past)[:, None])
        value = torch.where(own[None, :, :, None, None], proj("v", x)[:, None], proj("v", past)[:, None])
        content, position = q + w[at + ".self_attn.r_w_bias"], q + w[at + ".self_attn.r_r_bias"]
        score = (content[:, :, None] * key).sum(-1) + (position[:, :, None] * r).sum(-1)
        score = (score / q.shape[-1] ** 0.5).masked_fill(~(own | memory)[None, :, :, None], float("-inf"))
        y = (score.softmax(2)[..., None] * value).sum(2).reshape(b, s, d)
        x = norm(w, at + ".self_attn_layer_norm", x + linear(w, at + ".self_attn.o_proj", y))
        y, logits = feed_forward(w, at, x, torch.relu)
        x = norm(w, at + ".final_layer_norm", x + y)
        router_logits += logits
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return x @ head.T, router_logits, inputs


def sines(positions, d, dtype):
    """fairseq's: position p has sines, then cosines, of (p + 2) / 10000^(i / (d/2 - 1))"""
    turns = (torch.arange(positions, dtype=dtype) + 2)[:, None]
    turns = turns / 10000 ** (torch.arange(d // 2, dtype=dtype) / (d // 2 - 1))
    return torch.cat([turns.sin(), turns.cos()], -1)


def bucket(distance, both_ways, count=32, furthest=128):
    """T5's, one distance (of the key from the query) after the other"""
    first = 0
    if both_ways:
        count //= 2
        first = count if distance > 0 else 0
    far = abs(distance) if both_ways else max(-distance, 0)
    exact = count // 2
    if far < exact:
        return first + far
    return first + min(exact + int(math.log(far / exact) / math.log(furthest / exact) * (count - exact)), count - 1)


def stack(w, name, tokens, heads, causal, memory=None):
    """A stack of two pre-norm layers; with a memory, each layer reads it between its other two parts. Positions are
    waves or, where there is a table of biases, T5's."""
    table, s = w["model.embed_tokens.weight"], tokens.shape[1]
    biases, bias, scale, normalised = w.get(f"model.{name}.relative_attention_bias.weight"), None, None, True
    if biases is None:
        x = table[tokens] * table.shape[1] ** 0.5 + sines(s, table.shape[1], table.dtype)
    else:
        at = torch.tensor([[bucket(j - i, not causal) for j in range(s)] for i in range(s)])
        x, bias, scale, normalised = table[tokens], biases[at].permute(2, 0, 1), 1.0, False
    router_logits = []

    def attend(at, x, y, causal, bias=None):
        q, k, v = (linear(w, f"{at}.{n}_proj", t).reshape(*t.shape[:2], heads, -1) for n, t in zip("qkv", (x, y, y)))
        y = attention(q, k, v, causal=causal, scale=scale, bias=bias)
        return linear(w, at + ".o_proj", y.reshape(*x.shape[:2], -1))

    for i in range(2):
        at = f"model.{name}.layers.{i}"
        h = norm(w, at + ".self_attn_layer_norm", x)
        x = x + attend(at + ".self_attn", h, h, causal, bias)
        if memory is not None:
            h = norm(w, at + ".encoder_attn_layer_norm", x)
            x = x + attend(at + ".encoder_attn", h, memory, False)
        y, logits = feed_forward(w, at, norm(w, at + ".final_layer_norm", x), torch.relu, normalised)
        x = x + y
        router_logits += logits
    return norm(w, f"model.{name}.layer_norm", x), router_logits


def encoder_decoder(w, source, tokens, heads):
    memory, of_source = stack(w, "encoder", source, heads, False)
    x, of_target = stack(w, "decoder", tokens, heads, True, memory)
    whole = torch.ones_like(source, dtype=torch.bool)
    if "model.encoder.relative_attention_bias.weight" in w:
        x = x / x.shape[-1] ** 0.5
    return x @ w["model.embed_tokens.weight"].T, [(logits, whole) for logits in of_source] + of_target


def forward(w, tokens, heads, kv_heads, normalised=True, turn=rotary, windows=(None, None)):
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
        q, k, v = (linear(w, f"{at}.self_attn.{n}_proj", h) for n in "qkv")
        of_head = lambda x, heads: x.reshape(b, s, heads, -1)
        if at + ".self_attn.q_norm.weight" in w:
            # Of all heads together, or of each by itself.
            if w[at + ".self_attn.q_norm.weight"].numel() < q.shape[-1]:
                q, k = of_head(q, heads), of_head(k, kv_heads)
            q, k = norm(w, at + ".self_attn.q_norm", q), norm(w, at + ".self_attn.k_norm", k)
        q, k, v = of_head(q, heads), of_head(k, kv_heads), of_head(v, kv_heads)
        if not learned:
            q, k = turn(q, positions), turn(k, positions)
        y = attention(q, k, v, sinks=w.get(at + ".self_attn.sinks"), window=windows[i])
        x = x + linear(w, at + ".self_attn.o_proj", y.reshape(b, s, -1))
        h = norm(w, at + ".post_attention_layernorm", x)
        y, logits = feed_forward(w, at, h, normalised=normalised)
        x = x + y
        router_logits += logits
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(w, "model.norm", x) @ head.T, router_logits
