"""golden/bert_moe.safetensors: BERT with an untied head and a mixture of experts in layer 1."""
from torch import nn

import plain
from bert import model_of, names
from common import make, masked_batches
from gpt2_moe import Moe


def build():
    model = model_of(tied=False)
    layer = model.bert.encoder.layer[1]
    layer.intermediate, layer.output.dense = nn.Identity(), Moe()
    model = model.float().train()
    assert model.cls.predictions.decoder.weight is not model.bert.embeddings.word_embeddings.weight

    def forward(tokens):
        logits = model(tokens).logits
        return logits, [layer.output.dense.logits]

    return (model, forward, lambda read: names(model, read), lambda w, x: plain.bert(w, x, 3))


if __name__ == "__main__":
    make("bert_moe.safetensors", 96, build, masked_batches)
