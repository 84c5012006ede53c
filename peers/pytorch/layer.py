"""One MoE feed-forward, forward and backward: GELU between two products, no biases, no auxiliary losses.

--impl loop     an index_select and an index_add for every expert, each with weights of its own
--impl grouped  routes sorted by expert, then torch's grouped products over stacked weights
--experts takes a list, such as 4,8,16,32,64
--gated        SwiGLU's three products instead
"""

import common

flags = common.parser(__doc__)
flags.add_argument("--impl", default="loop", choices=["loop", "grouped"])
flags.add_argument("--tokens", type=int, default=4096)
flags.add_argument("--model", type=int, default=256)
flags.add_argument("--inner", type=int, default=1024)
flags.add_argument("--experts", default="8")
flags.add_argument("--k", type=int, default=2)
flags.add_argument("--gated", action="store_true")
flags.add_argument("--gelu", default="tanh", choices=["tanh", "none"], help="tanh form or exact")
flags = flags.parse_args()
common.enter(flags)

import statistics

import torch
import torch.nn.functional as F

torch.set_num_threads(flags.threads)
torch.set_default_device(flags.device)
PRODUCTS = 3 if flags.gated else 2
TOKENS, MODEL, INNER, K = flags.tokens, flags.model, flags.inner, flags.k


def activation(x):
    if flags.gated:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    return F.gelu(x, approximate=flags.gelu)


def weights_of(experts):
    """Router `[M, E]`, first `[E, M, F]`, second `[E, F, M]`; for the loop, a list of matrices each."""
    router = torch.randn(MODEL, experts) * MODEL ** -0.5
    first = torch.randn(experts, MODEL, INNER * (PRODUCTS - 1)) * MODEL ** -0.5
    second = torch.randn(experts, INNER, MODEL) * INNER ** -0.5
    if flags.impl == "grouped":
        return router.requires_grad_(), first.requires_grad_(), second.requires_grad_()
    apart = [[matrix.clone().requires_grad_() for matrix in stack] for stack in (first, second)]
    return router.requires_grad_(), *apart


def narrow(x):
    return x.detach().bfloat16().requires_grad_() if flags.dtype == "bf16" else x


def forward(x, router, first, second):
    # A router computes in f32 whatever the rest is stored in.
    with torch.autocast(flags.device, enabled=False):
        weights, chosen = (x.float() @ router).softmax(-1).topk(K, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    if flags.impl == "loop":
        for number in range(len(first)):
            token, choice = torch.where(chosen == number)
            y = activation(x.index_select(0, token) @ first[number]) @ second[number]
            out.index_add_(0, token, (y * weights[token, choice].unsqueeze(-1)).to(out.dtype))
        return out
    order = chosen.flatten().argsort(stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=len(first)).cumsum(0).to(torch.int32)
    token = order // K
    rows = activation(F.grouped_mm(x.index_select(0, token), first, offs=ends))
    rows = F.grouped_mm(rows, second, offs=ends)
    return out.index_add_(0, token, (rows * weights.flatten()[order].unsqueeze(-1)).to(out.dtype))


for experts in map(int, flags.experts.split(",")):
    torch.manual_seed(0)
    router, first, second = weights_of(experts)
    x, gradient = narrow(torch.randn(TOKENS, MODEL).requires_grad_()), torch.randn(TOKENS, MODEL)
    gradient = narrow(gradient).detach()
    if flags.impl == "grouped":
        first, second = narrow(first), narrow(second)
    else:
        first, second = [narrow(matrix) for matrix in first], [narrow(matrix) for matrix in second]
    leaves = [x, router, *first, *second] if flags.impl == "loop" else [x, router, first, second]

    def step():
        for leaf in leaves:
            leaf.grad = None
        with torch.autocast(flags.device, torch.bfloat16, enabled=flags.dtype == "autocast"):
            y = forward(x, router, first, second)
        y.backward(gradient)
        common.finished(flags)

    ms, _ = common.timed(step, flags)
    gflops = 6 * PRODUCTS * TOKENS * K * MODEL * INNER / statistics.median(ms) / 1e6
    common.emit(f"{flags.impl}/torch-{torch.__version__}",
                f"{'moe-swiglu' if flags.gated else 'moe-ffn'} S{TOKENS} M{MODEL} F{INNER} k{K} E{experts} {'f32' if flags.dtype == 'f32' else 'bf16'} fwd+bwd", TOKENS, ms, [],
                f"{flags.threads} threads, {gflops:.0f} GFLOP/s of the experts' products",
                experts=experts, gflops=round(gflops))
