"""golden/nllb_moe.safetensors: an encoder and a decoder, transformers' M2M100 (NLLB's dense model) with a mixture of
experts in the second layer of each. A row is 12 tokens of a source, which the encoder reads, and then 16 of a target."""
import torch
import torch.nn.functional as F
from torch import nn
from transformers import M2M100Config, M2M100ForConditionalGeneration

import plain
from common import D, ROWS, S, STEPS, V, make
from gpt2_moe import Moe

HEADS, SOURCE = 3, 12
FIRST = 2  # transformers takes token 1 for padding


def pairs(rng):
    tokens = torch.from_numpy(rng.integers(FIRST, V, size=(STEPS, ROWS, SOURCE + S)))
    targets = torch.full((STEPS, ROWS, S), -1)
    targets[:, :, :-1] = tokens[:, :, SOURCE + 1:]
    targets[:, 1, 3:6] = -1
    return tokens, targets, targets != -1


def names(model, read):
    """Our names -> tensors [out,in]."""
    out = {"model.embed_tokens.weight": read(model.model.shared.weight)}

    def affine(name, module):
        out[name + ".weight"], out[name + ".bias"] = read(module.weight), read(module.bias)

    for name, stack in (("encoder", model.model.encoder), ("decoder", model.model.decoder)):
        for i, layer in enumerate(stack.layers):
            at = f"model.{name}.layers.{i}"
            for part in ("self_attn", "encoder_attn")[:1 + (name == "decoder")]:
                attention = getattr(layer, part)
                for x in "qkv":
                    affine(f"{at}.{part}.{x}_proj", getattr(attention, x + "_proj"))
                affine(f"{at}.{part}.o_proj", attention.out_proj)
                affine(f"{at}.{part}_layer_norm", getattr(layer, part + "_layer_norm"))
            if isinstance(layer.fc2, Moe):
                out[at + ".block_sparse_moe.gate.weight"] = read(layer.fc2.gate.weight)
                for e, x in enumerate(layer.fc2.experts):
                    affine(f"{at}.block_sparse_moe.experts.{e}.fc_in", x.fc_in)
                    affine(f"{at}.block_sparse_moe.experts.{e}.fc_out", x.fc_out)
            else:
                affine(at + ".mlp.fc_in", layer.fc1)
                affine(at + ".mlp.fc_out", layer.fc2)
            affine(at + ".final_layer_norm", layer.final_layer_norm)
        affine(f"model.{name}.layer_norm", stack.layer_norm)
    return out


def build():
    model = M2M100ForConditionalGeneration(M2M100Config(
        vocab_size=V, d_model=D, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=4 * D, decoder_ffn_dim=4 * D, activation_function="relu",
        max_position_embeddings=S, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0, scale_embedding=True, tie_word_embeddings=True, attn_implementation="eager",
        pad_token_id=1, bos_token_id=None, eos_token_id=None, decoder_start_token_id=FIRST))
    moes = []
    for stack in (model.model.encoder, model.model.decoder):
        layer = stack.layers[1]
        layer.fc1, layer.activation_fn, layer.fc2 = nn.Identity(), nn.Identity(), Moe(F.relu)
        moes.append(layer.fc2)
    model = model.float().train()
    assert model.lm_head.weight is model.model.shared.weight is model.model.encoder.embed_tokens.weight
    assert len(list(model.parameters())) == len(names(model, lambda p: p))

    def forward(tokens):
        source = tokens[:, :SOURCE]
        logits = model(input_ids=source, decoder_input_ids=tokens[:, SOURCE:], use_cache=False).logits
        return logits, [(moes[0].logits, torch.ones_like(source, dtype=torch.bool)), moes[1].logits]

    return (model, forward, lambda read: names(model, read),
            lambda w, x: plain.encoder_decoder(w, x[:, :SOURCE], x[:, SOURCE:], HEADS))


if __name__ == "__main__":
    # Now and then an expert is idle: ReLU moves the features of all tokens alike, and seeds without are rare.
    make("nllb_moe.safetensors", 1130, build, pairs, idle=True)
