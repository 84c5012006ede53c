"""golden/ops.safetensors: single operations, computed in float64 on float32 inputs.

op/<op>/in/<name> (upstream gradient: dy), op/<op>/out/<name>, op/<op>/grad/<input name>.
Every forward is torch's own and is compared with the hand-written one of plain.py; every
gradient is torch's, checked by finite differences, and the float32 run is compared with it.
"""
import numpy as np
import torch
import torch.nn.functional as F

import plain
from common import save

rng = np.random.default_rng(7)
golden = {}


def draw(*shape, scale=1.0, mean=0.0):
    return torch.from_numpy(mean + scale * rng.standard_normal(shape)).float()


def op(name, torch_fn, hand_fn, inputs, constants=None, dy=None):
    """inputs: differentiable; constants: integers handed on as they are."""
    constants = constants or {}
    x = {k: v.double().requires_grad_() for k, v in inputs.items()}
    y = torch_fn(**x, **constants)
    torch.testing.assert_close(hand_fn(**x, **constants), y, rtol=1e-10, atol=1e-10)
    dy = draw(*y.shape) if dy is None else dy
    y.backward(dy.double())
    assert torch.autograd.gradcheck(lambda *a: torch_fn(**dict(zip(x, a)), **constants),
                                    tuple(x.values()), eps=1e-6, atol=1e-6, rtol=1e-5)
    x32 = {k: v.clone().requires_grad_() for k, v in inputs.items()}
    y32 = torch_fn(**x32, **constants)
    y32.backward(dy)
    worst = (y32 - y).abs().max().item()
    for k in inputs:
        worst = max(worst, (x32[k].grad - x[k].grad).abs().max().item())
    print(f"{name}: float32 differs from float64 by at most {worst:.1e}")
    assert worst < 2e-5
    for k, v in {**inputs, **constants, "dy": dy}.items():
        golden[f"op/{name}/in/{k}"] = v
    golden[f"op/{name}/out/y"] = y
    for k, v in x.items():
        golden[f"op/{name}/grad/{k}"] = v.grad


def hand_norm(x, weight, bias=None):
    w = {"n.weight": weight} if bias is None else {"n.weight": weight, "n.bias": bias}
    return plain.norm(w, "n", x)


def hand_softmax(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def hand_nll(logits, targets):
    keep = targets != -1
    logp = logits - logits.logsumexp(-1, keepdim=True)
    return -logp[keep].gather(1, targets[keep][:, None]).sum() / keep.sum()


def torch_attention(q, k, v, segments):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = q.shape[2]
    see = torch.ones(s, s, dtype=torch.bool).tril() & (segments[:, :, None] == segments[:, None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=see[:, None], enable_gqa=True).transpose(1, 2)


def torch_rotary(x, positions):
    """As transformers writes it: x*cos + rotate_half(x)*sin with doubled tables."""
    hd = x.shape[-1]
    inv = 1.0 / 10000.0 ** (torch.arange(0, hd, 2, dtype=x.dtype) / hd)
    angle = positions[..., None].to(x.dtype) * inv
    angle = torch.cat([angle, angle], -1)[:, :, None]
    rotated = torch.cat([-x[..., hd // 2:], x[..., : hd // 2]], -1)
    return x * angle.cos() + rotated * angle.sin()


shape = (6, 24)
op("layer_norm", lambda x, weight, bias: F.layer_norm(x, shape[1:], weight, bias, 1e-5), hand_norm,
   {"x": draw(*shape, scale=1.5, mean=0.5), "weight": draw(24, scale=0.2, mean=1), "bias": draw(24, scale=0.2)})
op("rms_norm", lambda x, weight: F.rms_norm(x, shape[1:], weight, 1e-5), hand_norm,
   {"x": draw(*shape, scale=1.5, mean=0.5), "weight": draw(24, scale=0.2, mean=1)})
edge = torch.tensor([[0.0, -0.0, 1e-3, -1e-3, 4.0, -4.0, 12.0, -12.0]])
op("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), plain.gelu,
   {"x": torch.cat([draw(7, 8, scale=2), edge])})
op("silu_mul", lambda gate, up: F.silu(gate) * up, lambda gate, up: plain.silu(gate) * up,
   {"gate": torch.cat([draw(7, 8, scale=2), 2 * edge]), "up": draw(8, 8)})
op("softmax", lambda x: F.softmax(x, -1), hand_softmax,
   {"x": torch.cat([draw(6, 9, scale=2), draw(1, 9) + 90, draw(1, 9) - 90])})
op("cross_entropy", lambda logits, targets: F.cross_entropy(logits, targets, ignore_index=-1), hand_nll,
   {"logits": torch.cat([draw(6, 11, scale=2), draw(1, 11) + 90, draw(1, 11) - 90])},
   {"targets": torch.tensor([3, -1, 10, 0, -1, 7, 2, 5])}, dy=torch.tensor(1.0))
segments = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 1 + [1] * 11])
op("attention", torch_attention, plain.attention,
   {"q": draw(2, 12, 4, 8), "k": draw(2, 12, 2, 8), "v": draw(2, 12, 2, 8)}, {"segments": segments})
positions = torch.tensor([list(range(12)), [0] + list(range(11))])
op("rotary", torch_rotary, plain.rotary, {"x": draw(2, 12, 4, 8)}, {"positions": positions})
golden["op/cross_entropy/out/nll"] = F.cross_entropy(  # per token, 0 where ignored
    golden["op/cross_entropy/in/logits"].double(), golden["op/cross_entropy/in/targets"],
    ignore_index=-1, reduction="none")
save("ops.safetensors", golden, "seed 7")
