"""golden/auxiliary.safetensors: the balance losses of other systems, and their slopes along router logits.

hf is transformers' own function; the others are written from what their authors published: Megatron Core (Switch's
loss over all choices of a micro-batch), DeepSeek-V2 (within each sequence, eqs. 23 to 25), FastMoE (first choices of a
batch, GShard's loss). All take the logits of several layers and add up over layers, but for hf, which takes the tokens
of all layers as one.
"""
import os

import numpy as np
import torch
from safetensors.torch import save_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from common import GOLDEN

LAYERS, ROWS, SEQ, EXPERTS, TOP_K = 3, 4, 6, 5, 2


def hf(logits):
    return load_balancing_loss_func(tuple(logits), EXPERTS, TOP_K)


def chosen(logits, k):
    return torch.nn.functional.one_hot(logits.topk(k, dim=-1).indices, EXPERTS).float().sum(-2)


def megatron(logits):
    loss = 0.0
    for layer in logits:
        tokens = len(layer)
        sums, routes = layer.softmax(-1).sum(0), chosen(layer, TOP_K).sum(0)
        loss = loss + (sums * routes).sum() * EXPERTS / (TOP_K * tokens * tokens)
    return loss


def deepseek(logits):
    loss = 0.0
    for layer in logits:
        for row in layer.split(SEQ):
            f = chosen(row, TOP_K).sum(0) * EXPERTS / (TOP_K * SEQ)
            loss = loss + (f * row.softmax(-1).mean(0)).sum() / ROWS
    return loss


def fastmoe(logits):
    loss = 0.0
    for layer in logits:
        c, m = chosen(layer, 1).mean(0), layer.softmax(-1).mean(0)
        loss = loss + (c * m).mean() * EXPERTS ** 2
    return loss


def check(name, loss):
    """When every token likes every expert as much, every loss is a number known beforehand."""
    even = torch.zeros(LAYERS, ROWS * SEQ, EXPERTS)
    want = TOP_K if name == "hf" else LAYERS
    assert abs(loss(even).item() - want) < 1e-5, name


if __name__ == "__main__":
    draws = np.random.default_rng(907).normal(size=(LAYERS, ROWS * SEQ, EXPERTS))
    # Layers with different favourites: their tokens together are more even than any layer's.
    draws += 1.5 * np.eye(EXPERTS)[[0, 3, 4]][:, None, :]
    logits = torch.tensor(draws, dtype=torch.float32)
    out = {"logits": logits}
    for name, loss in [("hf", hf), ("megatron", megatron), ("deepseek", deepseek), ("fastmoe", fastmoe)]:
        check(name, loss)
        leaf = logits.clone().requires_grad_()
        value = loss(leaf)
        value.backward()
        out |= {name: value.detach().reshape(1), f"{name}/slope": leaf.grad}
    save_file(out, os.path.join(GOLDEN, "auxiliary.safetensors"))
    print({name: float(x) for name, x in out.items() if x.numel() == 1})
