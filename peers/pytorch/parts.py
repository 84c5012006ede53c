"""What the two decoders share: attention, and the next-token loss."""

import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, width, bias, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        rows, seq, width = x.shape
        q, k, v = self.qkv(x).view(rows, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, seq, width))


def next_token_loss(logits, tokens):
    """Mean cross-entropy; a row's last token predicts nothing."""
    logits = logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def initialise(model, layers):
    """GPT-2's: standard deviation 0.02, less where products are added to the residual stream."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            residual = name.endswith(("out.weight", "down.weight", "down"))
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
