"""golden/gpt2_moe.safetensors: GPT-2 with an untied head and a mixture of experts in layer 1."""
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2LMHeadModel

import plain
from common import D, EXPERTS, TOP_K, make
from gpt2 import config, names


def gelu(x):
    return F.gelu(x, approximate="tanh")


class Expert(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.fc_in = nn.Linear(D, 4 * D)
        self.fc_out = nn.Linear(4 * D, D)
        self.activation = activation

    def forward(self, x):
        return self.fc_out(self.activation(self.fc_in(x)))


class Moe(nn.Module):
    """Each expert runs on the tokens routed to it; the results are gathered by index_add."""

    def __init__(self, activation=gelu):
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(activation) for _ in range(EXPERTS))

    def forward(self, hidden):
        x = hidden.reshape(-1, D)
        self.logits = self.gate(x)
        weight, index = F.softmax(self.logits, dim=-1).topk(TOP_K, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            y = y.index_add(0, token, expert(x[token]) * weight[token, slot, None])
        return y.reshape(hidden.shape)


def build():
    model = GPT2LMHeadModel(config(tied=False))
    model.transformer.h[1].mlp = Moe()
    model = model.float().train()
    assert model.lm_head.weight is not model.transformer.wte.weight

    def forward(tokens):
        logits = model(tokens, use_cache=False).logits
        return logits, [model.transformer.h[1].mlp.logits]

    return (model, forward, lambda read: names(model, read),
            lambda w, x: plain.forward(w, x, 3, 3))


if __name__ == "__main__":
    make("gpt2_moe.safetensors", 12, build)
