"""A training step of a decoder in Mixtral's style (RMS norm, SwiGLU experts, no biases) with learned positions.

--moe loop     each expert in turn gathers its tokens and adds what it makes of them: the plain PyTorch way
--moe grouped  routes sorted by expert, then torch's grouped products
--moe dense    one expert's network and no router, for comparison
--width, --inner, --layers, --heads, --experts, --k, --vocab, --shape make the model and the step others
--procs 2      two processes under DistributedDataParallel (gloo), half of the threads and of the rows each
"""

import common

flags = common.parser(__doc__)
flags.add_argument("--moe", default="loop", choices=["loop", "grouped", "dense"])
flags.add_argument("--procs", type=int, default=1)
for name, size in [("width", 256), ("inner", 1024), ("layers", 4), ("heads", 4), ("experts", 8), ("k", 2), ("vocab", 4096)]:
    flags.add_argument(f"--{name}", type=int, default=size)
flags.add_argument("--shape", default="16x128", help="rows of so many tokens")
flags = flags.parse_args()
rank = common.enter(flags, flags.procs)

import torch
import torch.nn as nn
import torch.nn.functional as F

import parts
import train

WIDTH, INNER, LAYERS, VOCAB = flags.width, flags.inner, flags.layers, flags.vocab
EXPERTS, TOP_K, BALANCE_WEIGHT = flags.experts, flags.k, 0.01
ROWS, SEQ = map(int, flags.shape.split("x"))


def narrow(x):
    """Grouped products do not convert their factors under autocast everywhere."""
    return x.bfloat16() if flags.dtype == "autocast" else x


class SwiGlu(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x)), 0.0


class Routed(nn.Module):
    """The router, and the balance loss of Switch Transformers, eq. 4."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        probabilities = self.router(tokens).softmax(-1)
        weights, chosen = probabilities.topk(TOP_K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        load = torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.numel()
        balance = EXPERTS * (load * probabilities.mean(0)).sum()
        return self.experts_of(tokens, weights, chosen).view_as(x), balance


class Loop(Routed):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(SwiGlu() for _ in range(EXPERTS))

    def experts_of(self, tokens, weights, chosen):
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            y, _ = expert(tokens.index_select(0, token))
            out.index_add_(0, token, (y * weights[token, choice].unsqueeze(-1)).to(out.dtype))
        return out


class Grouped(Routed):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))

    def experts_of(self, tokens, weights, chosen):
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)
        token = order // TOP_K
        rows = F.grouped_mm(narrow(tokens.index_select(0, token)), narrow(self.gate_up).transpose(1, 2), offs=ends)
        gate, up = rows.chunk(2, -1)
        rows = F.grouped_mm(F.silu(gate) * up, narrow(self.down).transpose(1, 2), offs=ends)
        rows = rows * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add_(0, token, rows.to(tokens.dtype))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = parts.Attention(WIDTH, bias=False, heads=flags.heads)
        self.mlp = {"loop": Loop, "grouped": Grouped, "dense": SwiGlu}[flags.moe]()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        y, balance = self.mlp(self.mlp_norm(x))
        return x + y, balance


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x, balance = self.tokens(tokens) + self.positions.weight[:tokens.shape[1]], 0.0
        for block in self.blocks:
            x, of_block = block(x)
            balance = balance + of_block
        return parts.next_token_loss(self.head(self.norm(x)), tokens) + BALANCE_WEIGHT * balance


torch.set_num_threads(max(1, flags.threads // flags.procs))
if flags.procs > 1:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
torch.set_default_device(flags.device)
model = Decoder()
torch.set_default_device("cpu")
parts.initialise(model, LAYERS)
sort = "dense" if flags.moe == "dense" else "moe"
experts = "" if flags.moe == "dense" else f" E{EXPERTS} k{TOP_K}"
workload = f"{sort} d{WIDTH} L{LAYERS} F{INNER}{experts} V{VOCAB} b{flags.shape} {train.label(flags)} x{flags.procs}"
system = f"{flags.moe}/torch-{torch.__version__}"
notes = "learned positions" + (", data parallel, peak of all ranks" if flags.procs > 1 else "")
train.run(model, system, workload, flags, rank, flags.procs, notes, ROWS, SEQ)
