"""The decoder of pytorch/decoder.py with Tutel's MoE layer: two processes share the experts.

--capacity 1.0 drops routes beyond an even share; --capacity 0 keeps all, and pads every expert to the fullest one.
Gradients of what is not an expert are summed by one all-reduce each after backward, as in Tutel's own example.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "pytorch"))

import common

flags = common.parser(__doc__)
flags.add_argument("--capacity", type=float, default=1.0)
flags.add_argument("--procs", type=int, default=2)
flags = flags.parse_args()
rank = common.enter(flags, flags.procs)
os.environ.setdefault("LOCAL_RANK", str(rank))

import torch
import torch.distributed as dist
import torch.nn as nn

# What Tutel logs goes to standard error.
result = os.dup(1)
os.dup2(2, 1)

from tutel import moe, system

import parts
import train

WIDTH, INNER, LAYERS, EXPERTS, TOP_K, BALANCE_WEIGHT = 256, 1024, 4, 8, 2, 0.01


def marked(_, parameter):
    parameter.is_of_an_expert = True


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = parts.Attention(WIDTH, bias=False)
        gate = {"type": "top", "k": TOP_K, "fp32_gate": True, "capacity_factor": flags.capacity}
        experts = {"type": "llama_ffn", "num_experts_per_device": EXPERTS // flags.procs, "hidden_size_per_expert": INNER}
        self.mlp = moe.moe_layer(gate_type=gate, model_dim=WIDTH, seeds=(1, rank + 1, 1), experts=experts,
                                 scan_expert_func=marked)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp(self.mlp_norm(x))
        return x + y, y.l_aux


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
system.init_data_model_parallel(backend="gloo")
torch.manual_seed(0)
model = Decoder()
parts.initialise(model, LAYERS)
optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
share = train.ROWS // flags.procs
steps = flags.warmup + flags.steps
tokens = torch.tensor(common.stream(steps * train.ROWS * train.SEQ)).view(steps, train.ROWS, train.SEQ)
batches = iter(tokens[:, rank * share:(rank + 1) * share].contiguous())


def step():
    optimizer.zero_grad(set_to_none=True)
    loss = model(next(batches))
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        if not hasattr(parameter, "is_of_an_expert"):
            dist.all_reduce(parameter.grad)
        parameter.grad /= flags.procs
    optimizer.step()
    return loss.item()


ms, losses = common.timed(step, flags)
if rank == 0:
    sys.stdout.flush()
    os.dup2(result, 1)
    kept = f"capacity factor {flags.capacity:g}" if flags.capacity > 0 else "nothing dropped"
    workload = f"moe d{WIDTH} L{LAYERS} F{INNER} E{EXPERTS} k{TOP_K} V{train.VOCAB} b{train.ROWS}x{train.SEQ} f32 x{flags.procs}"
    common.emit(f"tutel/torch-{torch.__version__}", workload, train.ROWS * train.SEQ, ms, losses,
                f"learned positions, expert parallel, {kept}, peak of one rank")
dist.barrier()
dist.destroy_process_group()
