"""The model families written out by hand over a dict of weights in Guildhall's names.
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


def attention(q, k, v, segments=None, causal=True):
    """q [B,S,H,hd], k and v [B,S,KV,hd], or of another length if not causal; within a segment; head h
    reads kv head h // (H/KV)"""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    score = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    s = q.shape[1]
    see = torch.ones(s, k.shape[1], dtype=torch.bool)
    see = (see.tril() if causal else see).expand(q.shape[0], *see.shape)
    if segments is not None:
        see = see & (segments[:, :, None] == segments[:, None, :])
    score = score.masked_fill(~see[:, None], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", score.softmax(-1), v)


def expert(w, name, x, activation=gelu):
    if name + ".gate_proj.weight" in w:
        return linear(w, name + ".down_proj", silu(linear(w, name + ".gate_proj", x)) * linear(w, name + ".up_proj", x))
    if name + ".w1.weight" in w:
        return linear(w, name + ".w2", silu(linear(w, name + ".w1", x)) * linear(w, name + ".w3", x))
    return linear(w, name + ".fc_out", activation(linear(w, name + ".fc_in", x)))


def moe(w, name, x, activation=gelu):
    """x [T,D] -> y [T,D], router logits [T,E]; every expert runs on every token, unused ones weigh 0"""
    logits = linear(w, name + ".gate", x)
    _, index, weight, _ = route(logits)
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        share = sum(weight[:, j] * (index[:, j] == e) for j in range(TOP_K))
        y = y + share[:, None] * expert(w, f"{name}.experts.{e}", x, activation)
    return y, logits


def feed_forward(w, at, x, activation=gelu):
    """x [B,S,D] -> y [B,S,D], router logits of a MoE layer in a list"""
    if at + ".block_sparse_moe.gate.weight" not in w:
        return expert(w, at + ".mlp", x, activation), []
    y, logits = moe(w, at + ".block_sparse_moe", x.reshape(-1, x.shape[-1]), activation)
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


def stack(w, name, tokens, heads, causal, memory=None):
    """A stack of two pre-norm layers; with a memory, each layer reads it between its other two parts."""
    table = w["model.embed_tokens.weight"]
    x = table[tokens] * table.shape[1] ** 0.5 + sines(tokens.shape[1], table.shape[1], table.dtype)
    router_logits = []

    def attend(at, x, y, causal):
        q, k, v = (linear(w, f"{at}.{n}_proj", t).reshape(*t.shape[:2], heads, -1) for n, t in zip("qkv", (x, y, y)))
        return linear(w, at + ".o_proj", attention(q, k, v, causal=causal).reshape(x.shape))

    for i in range(2):
        at = f"model.{name}.layers.{i}"
        h = norm(w, at + ".self_attn_layer_norm", x)
        x = x + attend(at + ".self_attn", h, h, causal)
        if memory is not None:
            h = norm(w, at + ".encoder_attn_layer_norm", x)
            x = x + attend(at + ".encoder_attn", h, memory, False)
        y, logits = feed_forward(w, at, norm(w, at + ".final_layer_norm", x), torch.relu)
        x = x + y
        router_logits += logits
    return norm(w, f"model.{name}.layer_norm", x), router_logits


def encoder_decoder(w, source, tokens, heads):
    memory, of_source = stack(w, "encoder", source, heads, False)
    x, of_target = stack(w, "decoder", tokens, heads, True, memory)
    whole = torch.ones_like(source, dtype=torch.bool)
    return x @ w["model.embed_tokens.weight"].T, [(logits, whole) for logits in of_source] + of_target


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
        if at + ".self_attn.q_norm.weight" in w:
            q, k = norm(w, at + ".self_attn.q_norm", q), norm(w, at + ".self_attn.k_norm", k)
        if not learned:
            q, k = rotary(q, positions), rotary(k, positions)
        x = x + linear(w, at + ".self_attn.o_proj", attention(q, k, v).reshape(b, s, -1))
        h = norm(w, at + ".post_attention_layernorm", x)
        y, logits = feed_forward(w, at, h)
        x = x + y
        router_logits += logits
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(w, "model.norm", x) @ head.T, router_logits
