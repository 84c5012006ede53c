"""golden/transformer_xl_moe.safetensors: Transformer-XL with an untied head and a mixture of experts in layer 1.
The segments' router logits are put back in the order of rows."""
import torch
import torch.nn.functional as F

from common import EXPERTS, ROWS, S, make
from gpt2_moe import Expert, Moe
from transformer_xl import TransformerXl, by_hand, freeze, names


class Recording(Moe):
    """Keeps the router logits of every call: one a segment."""

    def forward(self, hidden):
        y = super().forward(hidden)
        self.kept.append(self.logits.reshape(len(hidden), -1, EXPERTS))
        return y


def build():
    moe = Recording(F.relu)
    model = TransformerXl([Expert(F.relu), moe], tied=False)

    def forward(tokens):
        moe.kept = []
        logits = model(tokens)
        return logits, [torch.cat(moe.kept, 1).reshape(ROWS * S, EXPERTS)]

    return model, forward, lambda read: names(model, read), by_hand


if __name__ == "__main__":
    make("transformer_xl_moe.safetensors", 381, build, freeze=freeze)
