"""A training step of a dense decoder in GPT-2's style: layer norm, biases, GELU, learned positions, untied head."""

import common

flags = common.parser(__doc__)
flags.add_argument("--shapes", default="16x128", help="steps of so many rows of so many tokens: 16x128,1x2048")
flags = flags.parse_args()
common.enter(flags)

import torch
import torch.nn as nn
import torch.nn.functional as F

import parts
import train

WIDTH, INNER, LAYERS = 256, 1024, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = parts.Attention(WIDTH, bias=True)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Decoder(nn.Module):
    def __init__(self, seq):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(train.VOCAB, WIDTH), nn.Embedding(seq, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, train.VOCAB, bias=False)

    def forward(self, tokens):
        x = self.blocks(self.tokens(tokens) + self.positions.weight[:tokens.shape[1]])
        return parts.next_token_loss(self.head(self.norm(x)), tokens)


torch.set_num_threads(flags.threads)
for shape in flags.shapes.split(","):
    rows, seq = map(int, shape.split("x"))
    torch.manual_seed(0)
    model = Decoder(seq)
    parts.initialise(model, LAYERS)
    workload = f"gpt d{WIDTH} L{LAYERS} F{INNER} V{train.VOCAB} b{shape} {train.label(flags)} x1"
    train.run(model, f"torch-{torch.__version__}", workload, flags, rows=rows, seq=seq)
