"""The decoder of pytorch/decoder.py with DeepSpeed's MoE layer: two processes share the experts (ep_size 2).

--capacity 1.0 drops routes beyond an even share; --capacity 0 keeps all, and pads every expert to the fullest one.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "pytorch"))
os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # ninja, for the op that it compiles

import common

flags = common.parser(__doc__)
flags.add_argument("--capacity", type=float, default=1.0)
flags.add_argument("--procs", type=int, default=2)
flags = flags.parse_args()
rank = common.enter(flags, flags.procs)
os.environ.setdefault("LOCAL_RANK", str(rank))

import torch
import torch.nn as nn
import torch.nn.functional as F

# What DeepSpeed logs goes to standard error.
result = os.dup(1)
os.dup2(2, 1)

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as by_group

import parts
import train

WIDTH, INNER, LAYERS, EXPERTS, TOP_K, BALANCE_WEIGHT = 256, 1024, 4, 8, 2, 0.01


class SwiGlu(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = parts.Attention(WIDTH, bias=False)
        self.mlp = MoE(WIDTH, SwiGlu(), num_experts=EXPERTS, ep_size=flags.procs, k=TOP_K, min_capacity=4,
                       capacity_factor=flags.capacity or 1.0, drop_tokens=flags.capacity > 0)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        y, balance, _ = self.mlp(self.mlp_norm(x))
        return x + y, balance


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(train.VOCAB, WIDTH), nn.Embedding(train.SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, train.VOCAB, bias=False)

    def forward(self, tokens):
        x, balance = self.tokens(tokens) + self.positions.weight[:tokens.shape[1]], 0.0
        for block in self.blocks:
            x, of_block = block(x)
            balance = balance + of_block
        return parts.next_token_loss(self.head(self.norm(x)), tokens) + BALANCE_WEIGHT * balance


torch.set_num_threads(max(1, flags.threads // flags.procs))
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = Decoder()
parts.initialise(model, LAYERS)
groups = by_group({"params": list(model.parameters()), "name": "all"})
optimizer = torch.optim.AdamW(groups, lr=flags.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
share = train.ROWS // flags.procs
settings = {"train_micro_batch_size_per_gpu": share, "gradient_accumulation_steps": 1, "steps_per_print": 10**9,
            "zero_optimization": {"stage": 0}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
steps = flags.warmup + flags.steps
tokens = torch.tensor(common.stream(steps * train.ROWS * train.SEQ)).view(steps, train.ROWS, train.SEQ)
batches = iter(tokens[:, rank * share:(rank + 1) * share].contiguous())


def step():
    loss = engine(next(batches))
    engine.backward(loss)
    engine.step()
    return loss.item()


ms, losses = common.timed(step, flags)
if rank == 0:
    sys.stdout.flush()
    os.dup2(result, 1)
    kept = f"capacity factor {flags.capacity:g}" if flags.capacity > 0 else "nothing dropped"
    workload = f"moe d{WIDTH} L{LAYERS} F{INNER} E{EXPERTS} k{TOP_K} V{train.VOCAB} b{train.ROWS}x{train.SEQ} f32 x{flags.procs}"
    common.emit(f"deepspeed-{deepspeed.__version__}/torch-{torch.__version__}", workload, train.ROWS * train.SEQ, ms, losses,
                f"learned positions, expert parallel, {kept}, peak of one rank")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
