"""Shared by the golden programs: batches, the loss, ten AdamW steps, checks and the file format."""
import itertools
import math
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

V, S, D, ROWS, STEPS = 61, 16, 24, 3, 10
EXPERTS, TOP_K = 4, 2
MASK = 0
BALANCE_WEIGHT, Z_WEIGHT = 0.02, 0.001
MIN_GAP = 5e-4  # smallest distance allowed between the 2nd and 3rd routing probability
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden")


def batches(rng):
    tokens = rng.integers(0, V, size=(STEPS, ROWS, S))
    targets = np.full_like(tokens, -1)
    targets[:, :, :-1] = tokens[:, :, 1:]
    targets[:, 1, 3:6] = -1
    tokens, targets = torch.from_numpy(tokens), torch.from_numpy(targets)
    return tokens, targets, targets != -1


def batches_of_all(rng):
    """The same, where balance and z look at all tokens, as in the dialects of other systems."""
    tokens, targets, counted = batches(rng)
    return tokens, targets, torch.ones_like(counted)


def masked_batches(rng):
    """A quarter of the tokens is to be predicted, most of them from behind token MASK; all tokens count."""
    tokens = torch.from_numpy(rng.integers(0, V, size=(STEPS, ROWS, S)))
    selected = torch.from_numpy(rng.random(tokens.shape) < 0.25)
    hidden = selected & torch.from_numpy(rng.random(tokens.shape) < 0.8)
    targets = tokens.masked_fill(~selected, -1)
    return tokens.masked_fill(hidden, MASK), targets, torch.ones_like(selected)


@torch.no_grad()
def redraw(model, rng):
    """Draws every parameter anew, by the kind its (Hugging Face) name shows."""
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        mean, std = 0.0, 1.0 / D**0.5  # matrices
        if p.dim() == 1:
            mean, std = (0.0 if name.endswith("bias") else 1.0), 0.2
        elif "wte" in name or "wpe" in name or "embed_tokens" in name or "shared" in name or "_embeddings" in name:
            std = 0.3 if model.config.tie_word_embeddings else 0.6
        elif "gate.weight" in name:
            std = 0.35
        elif "down_proj" in name or "fc_out" in name or "mlp.c_proj" in name:
            std = 0.15
        p.copy_(torch.from_numpy(mean + std * rng.standard_normal(tuple(p.shape))))


def route(router_logits):
    """probabilities [T,E], chosen experts [T,k], their renormalised weights [T,k], smallest gap"""
    p = router_logits.softmax(-1)
    sorted_p = p.sort(-1, descending=True).values
    weight, index = p.topk(TOP_K, -1)
    gap = (sorted_p[:, TOP_K - 1] - sorted_p[:, TOP_K]).min().item()
    return p, index, weight / weight.sum(-1, keepdim=True), gap


class Softmax:
    """What a router chooses by, of how many experts and how many of them."""
    experts, top_k = EXPERTS, TOP_K

    def route(self, router_logits):
        """probabilities [T,E], chosen experts [T,k], smallest gap"""
        p, index, _, gap = route(router_logits)
        return p, index, gap

    def of_token(self, x):
        """The same of one token's logits, a list: probabilities and chosen experts."""
        norm = sum(map(math.exp, x))
        chosen = [e for e in range(self.experts) if sum(other > x[e] for other in x) < self.top_k]
        return [math.exp(one) / norm for one in x], chosen


def loss_parts(logits, router_logits, targets, counted, router=Softmax()):
    """ce, balance and z (the last two summed over MoE layers) and facts about the routing.

    logits [rows,S,V]; router_logits: one [rows*S,E] per MoE layer; targets [rows,S], -1 ignored;
    counted [rows,S]: the tokens that balance and z look at. A layer that looks at others, or at rows of
    another length, comes as a pair of its logits and of what it counts.
    """
    ce = F.cross_entropy(logits.reshape(-1, V), targets.reshape(-1), ignore_index=-1)
    balance, z = logits.new_zeros(()), logits.new_zeros(())
    gap, fewest = 1.0, logits.shape[0] * S
    for rl, counted in with_counted(router_logits, counted):
        n = counted.sum().item()
        p, index, layer_gap = router.route(rl)
        gap = min(gap, layer_gap)
        chosen = F.one_hot(index, router.experts).sum(1)
        fewest = min(fewest, chosen[counted.reshape(-1)].sum(0).min().item())
        p, chosen, rl = (t.reshape(*counted.shape, router.experts) for t in (p, chosen, rl))
        for s, keep in enumerate(counted):
            n_s = keep.sum().item()
            f = chosen[s, keep].to(p.dtype).sum(0) / (n_s * router.top_k)
            balance = balance + n_s / n * router.experts * (f * p[s, keep].mean(0)).sum()
        z = z + (rl[counted].logsumexp(-1) ** 2).sum() / n
    return ce, balance, z, gap, fewest


def with_counted(router_logits, counted):
    return [rl if isinstance(rl, tuple) else (rl, counted) for rl in router_logits]


def loss_parts_slowly(logits, router_logits, targets, counted, router=Softmax()):
    """The same three numbers, one token at a time from the definitions, as a check."""
    logits, valid = logits.tolist(), int((targets != -1).sum())
    ce = balance = z = 0.0
    for s, row in enumerate(targets.tolist()):
        for t, target in enumerate(row):
            if target != -1:
                ce += (math.log(sum(map(math.exp, logits[s][t]))) - logits[s][t][target]) / valid
    for rl, counted in with_counted(router_logits, counted):
        rl, n, length = rl.tolist(), int(counted.sum()), counted.shape[1]
        for s, row in enumerate(counted.tolist()):
            here = [rl[s * length + t] for t, counts in enumerate(row) if counts]
            routes, mean_p = [0] * router.experts, [0.0] * router.experts
            for x in here:
                z += math.log(sum(map(math.exp, x))) ** 2 / n
                p, chosen = router.of_token(x)
                for e in range(router.experts):
                    mean_p[e] += p[e] / len(here)
                    routes[e] += e in chosen
            assert sum(routes) == router.top_k * len(here)
            for e in range(router.experts):
                balance += len(here) / n * router.experts * routes[e] / (len(here) * router.top_k) * mean_p[e]
    return ce, balance, z


def total(ce, balance, z):
    return ce + BALANCE_WEIGHT * balance + Z_WEIGHT * z


def train(params, forward, named, tokens, targets, counted, router=Softmax()):
    """Ten steps. params: the tensors AdamW owns; forward(tokens) -> logits, [router logits];
    named(read) -> our names to read(parameter) in our orientation."""
    decays = lambda p: p.dim() >= 2 and not getattr(p, "is_bias", False)  # of several experts one above the other
    decay = [p for p in params if decays(p)]
    plain = [p for p in params if not decays(p)]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    value, grad = (lambda p: p.detach()), (lambda p: p.grad)
    out = {f"init/{k}": v.clone() for k, v in named(value).items()}
    curve = {k: [] for k in ("loss", "ce", "balance", "z", "grad_norm")}
    gap, fewest = 1.0, ROWS * S
    for step in range(STEPS):
        opt.zero_grad()
        logits, router_logits = forward(tokens[step])
        ce, balance, z, step_gap, step_fewest = loss_parts(
            logits, router_logits, targets[step], counted[step], router)
        gap, fewest = min(gap, step_gap), min(fewest, step_fewest)
        loss = total(ce, balance, z)
        loss.backward()
        for p in params:  # of an expert that nobody visited
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if step == 0:
            out["logits"] = logits.detach().clone()
            out.update({f"grad/{k}": v.clone() for k, v in named(grad).items()})
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        for k, v in zip(curve, (loss, ce, balance, z, norm)):
            curve[k].append(v.item())
        opt.step()
    out.update({f"after/{k}": v.clone() for k, v in named(value).items()})
    out.update({k: torch.tensor(v, dtype=torch.float64) for k, v in curve.items()})
    return out, gap, fewest


def check(out, forward, tokens, targets, counted, rng, freeze=None, router=Softmax()):
    """Checks against `forward(weights, tokens)`, the plain model of plain.py, in float64:
    the loss, the logits, the gradient (by finite differences and by autograd), and the ten steps.
    Where some of the model passes no gradient, `freeze(weights, tokens)` is the function of weights
    and tokens in which that part stays as it is at these weights."""
    w = {k[5:]: v.double().contiguous() for k, v in out.items() if k.startswith("init/")}

    with torch.no_grad():
        frozen = freeze(w, tokens[0]) if freeze else forward

    def loss_of(weights):
        return total(*loss_parts(*frozen(weights, tokens[0]), targets[0], counted[0], router)[:3])

    with torch.no_grad():
        slow = loss_parts_slowly(*forward(w, tokens[0]), targets[0], counted[0], router)
        for k, x in zip(("ce", "balance", "z"), slow):
            assert abs(x - out[k][0].item()) < 1e-5, (k, x)
        err = (forward(w, tokens[0])[0] - out["logits"]).abs().max().item()
        print(f"  logits: float32 against plain float64: {err:.1e}")
        assert err < 2e-5
        worst = 0.0
        trained = {k: v for k, v in w.items() if f"grad/{k}" in out}
        for name, t in trained.items():
            g = out[f"grad/{name}"].reshape(-1)
            for i in (g.abs().argmax().item(), int(rng.integers(g.numel()))):
                at, h, two = t.reshape(-1), 1e-5, []
                before = at[i].item()
                for sign in (1, -1):
                    at[i] = before + sign * h
                    two.append(loss_of(w).item())
                at[i] = before
                err = abs((two[0] - two[1]) / (2 * h) - g[i].item())
                assert err < 2e-6 + 1e-5 * g.abs().max().item(), (name, i, err)
                worst = max(worst, err)
    print(f"  gradient: worst of {2 * len(trained)} float64 finite differences: {worst:.1e}")
    p = {k: v.clone().requires_grad_(k in trained) for k, v in w.items()}
    again, _, _ = train([p[k] for k in trained], lambda x: forward(p, x),
                        lambda read: {k: read(v) for k, v in p.items() if read(v) is not None}, tokens, targets, counted, router)
    # Weights of cosines of distances too long to turn move all scores of a query nearly alike, as key biases do.
    sure = lambda k, v: v[:, :D // 2] if k.endswith("r_proj.weight") else v
    for part in ("grad/", "after/"):
        errs = {k: sure(k, v - out[k]).abs().max().item() for k, v in again.items() if k.startswith(part)}
        loose = {k: e for k, e in errs.items() if k.endswith("k_proj.bias")}
        tight = {k: e for k, e in errs.items() if k not in loose}
        name = max(tight, key=tight.get)
        print(f"  {part} against float64: worst {tight[name]:.1e} ({name});"
              f" key biases {max(loose.values(), default=0):.1e}")
        assert tight[name] < (1e-6 if part == "grad/" else 5e-4)
    for k in ("loss", "ce", "balance", "z", "grad_norm"):
        err = ((again[k] - out[k]).abs() / out[k].abs().clamp(min=1)).max().item()
        print(f"  {k}: {err:.1e} from float64; " + " ".join(f"{x:.6f}" for x in out[k].tolist()))
        assert err < 2e-5


def make(file, seed, build, batches=batches, freeze=None, idle=False, router=Softmax(), state={}):
    """build() -> model, forward(tokens), named(read), plain forward(weights, tokens).
    state: what a model remembers and does not learn, by our names. Tries seeds from `seed` until the routing is nowhere close to a tie and, unless they may be, no expert is idle."""
    for seed in itertools.count(seed):
        rng = np.random.default_rng(seed)
        model, forward, named, plain = build()
        redraw(model, rng)
        tokens, targets, counted = batches(rng)
        out, gap, fewest = train([p for p in model.parameters() if p.requires_grad], forward, named, tokens, targets, counted, router)
        if gap > MIN_GAP and (idle or fewest > 0):
            break
    print(f"{file}: seed {seed}, smallest routing gap {gap:.2e}, fewest routes of an expert {fewest}")
    check(out, plain, tokens, targets, counted, rng, freeze, router)
    out["tokens"], out["targets"] = tokens, targets
    out.update({f"state/{name}": value for name, value in state.items()})
    save(file, out, f"seed {seed}")


def save(file, tensors, note):
    """Integers as int32, the rest as float32. One metadata entry keeps the bytes reproducible."""
    tensors = {k: v.detach().to(torch.float32 if v.is_floating_point() else torch.int32).contiguous().clone()
               for k, v in tensors.items()}
    assert all(torch.isfinite(v).all() for v in tensors.values())
    os.makedirs(GOLDEN, exist_ok=True)
    path = os.path.join(GOLDEN, file)
    save_file(tensors, path, metadata={
        "made_by": f"torch {torch.__version__}, transformers {transformers.__version__}, {note}"})
    os.chmod(path, 0o644)
    print(f"  {len(tensors)} tensors, {os.path.getsize(path)} bytes")
