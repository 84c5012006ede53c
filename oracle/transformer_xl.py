"""golden/transformer_xl.safetensors: Transformer-XL by its definition (Dai et al. 2019), tied head, dense.
One segment after the other, one query after the other, one key after the other."""
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import plain
from common import D, S, V, make
from gpt2_moe import Expert

HEADS, SEGMENT, MEMORY = 3, 4, 6


def wave(distance):
    """R_n: sines, then cosines, of n / 10000^(2i/D)"""
    turns = torch.tensor([distance / 10000 ** (2 * i / D) for i in range(D // 2)], dtype=torch.float64)
    return torch.cat([turns.sin(), turns.cos()]).float()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for x in "qkvro":
            setattr(self, x + "_proj", nn.Linear(D, D, bias=False))
        self.r_w_bias, self.r_r_bias = (nn.Parameter(torch.zeros(HEADS, D // HEADS)) for _ in range(2))

    def forward(self, x, memory):
        """x [B,n,D], memory [B,m,D] before it -> [B,n,D]"""
        heads = lambda t: t.reshape(*t.shape[:-1], HEADS, -1)
        all_of_it = torch.cat([memory, x], 1)
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(all_of_it)), heads(self.v_proj(all_of_it))
        out = []
        for i in range(x.shape[1]):
            last = memory.shape[1] + i
            scores = []
            for j in range(last + 1):
                r = heads(self.r_proj(wave(last - j)))
                content = ((q[:, i] + self.r_w_bias) * k[:, j]).sum(-1)
                position = ((q[:, i] + self.r_r_bias) * r).sum(-1)
                scores.append((content + position) / (D // HEADS) ** 0.5)
            weights = torch.stack(scores, 1).softmax(1)
            out.append((weights[..., None] * v[:, :last + 1]).sum(1).reshape(-1, D))
        return self.o_proj(torch.stack(out, 1))


class Layer(nn.Module):
    def __init__(self, feed_forward):
        super().__init__()
        self.self_attn, self.feed_forward = Attention(), feed_forward
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(D, 1e-5), nn.LayerNorm(D, 1e-5)

    def forward(self, x, memory):
        x = self.self_attn_layer_norm(x + self.self_attn(x, memory))
        return self.final_layer_norm(x + self.feed_forward(x))


class TransformerXl(nn.Module):
    def __init__(self, feed_forwards, tied):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=tied)
        self.embed_tokens = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Layer(f) for f in feed_forwards)
        if not tied:
            self.lm_head = nn.Linear(D, V, bias=False)

    def forward(self, tokens):
        """Logits, and what each layer was given, from the segments of all rows."""
        memories = [torch.zeros(len(tokens), 0, D) for _ in self.layers]
        out = []
        for begin in range(0, S, SEGMENT):
            x = self.embed_tokens(tokens[:, begin:begin + SEGMENT]) * D**0.5
            for n, layer in enumerate(self.layers):
                memory = memories[n]
                memories[n] = torch.cat([memory, x.detach()], 1)[:, -MEMORY:]
                x = layer(x, memory)
            out.append(x)
        head = self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return torch.cat(out, 1) @ head.T


def names(model, read):
    """Our names -> tensors; the modules are named alike but for feed-forwards."""
    out = {}
    for name, p in model.named_parameters():
        part = "block_sparse_moe" if "gate" in name or "experts" in name else "mlp"
        name = name.replace("feed_forward", part)
        out[name if name.startswith("lm_head") else "model." + name] = read(p)
    return out


def by_hand(w, tokens):
    return plain.transformer_xl(w, tokens, HEADS, SEGMENT, MEMORY)[:2]


def freeze(w, tokens):
    """What is remembered passes no gradient: it stays as it is while weights are moved."""
    remembered = plain.transformer_xl(w, tokens, HEADS, SEGMENT, MEMORY)[2]
    return lambda w, tokens: plain.transformer_xl(w, tokens, HEADS, SEGMENT, MEMORY, remembered)[:2]


def build():
    model = TransformerXl([Expert(F.relu), Expert(F.relu)], tied=True)
    return model, lambda tokens: (model(tokens), []), lambda read: names(model, read), by_hand


if __name__ == "__main__":
    make("transformer_xl.safetensors", 30, build, freeze=freeze)
