"""golden/bert.safetensors: transformers' BERT with its head for masked tokens, tied, dense."""
from transformers import BertConfig, BertForMaskedLM

import plain
from common import D, S, V, make, masked_batches


def model_of(tied):
    """Without token types: a table of zeros that is not trained."""
    model = BertForMaskedLM(BertConfig(
        vocab_size=V, hidden_size=D, num_hidden_layers=2, num_attention_heads=3, intermediate_size=4 * D,
        hidden_act="gelu_new", max_position_embeddings=S, type_vocab_size=1, layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, tie_word_embeddings=tied,
        attn_implementation="eager", pad_token_id=None)).float().train()
    types = model.bert.embeddings.token_type_embeddings.weight
    types.data.zero_()
    types.requires_grad_(False)
    return model


def names(model, read):
    """Our names -> tensors [out,in]."""
    embeddings, head = model.bert.embeddings, model.cls.predictions
    out = {"model.embed_tokens.weight": read(embeddings.word_embeddings.weight),
           "model.embed_positions.weight": read(embeddings.position_embeddings.weight),
           "lm_head.bias": read(head.decoder.bias)}

    def affine(name, module):
        out[name + ".weight"], out[name + ".bias"] = read(module.weight), read(module.bias)

    affine("model.layernorm_embedding", embeddings.LayerNorm)
    for i, layer in enumerate(model.bert.encoder.layer):
        at, own = f"model.layers.{i}", layer.attention.self
        for x, module in zip("qkv", (own.query, own.key, own.value)):
            affine(f"{at}.self_attn.{x}_proj", module)
        affine(at + ".self_attn.o_proj", layer.attention.output.dense)
        affine(at + ".self_attn_layer_norm", layer.attention.output.LayerNorm)
        if hasattr(layer.intermediate, "dense"):
            affine(at + ".mlp.fc_in", layer.intermediate.dense)
            affine(at + ".mlp.fc_out", layer.output.dense)
        else:
            moe = layer.output.dense
            out[at + ".block_sparse_moe.gate.weight"] = read(moe.gate.weight)
            for e, x in enumerate(moe.experts):
                affine(f"{at}.block_sparse_moe.experts.{e}.fc_in", x.fc_in)
                affine(f"{at}.block_sparse_moe.experts.{e}.fc_out", x.fc_out)
        affine(at + ".final_layer_norm", layer.output.LayerNorm)
    affine("lm_head.dense", head.transform.dense)
    affine("lm_head.layer_norm", head.transform.LayerNorm)
    if head.decoder.weight is not embeddings.word_embeddings.weight:
        out["lm_head.decoder.weight"] = read(head.decoder.weight)
    return out


def build():
    model = model_of(tied=True)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    return (model, lambda tokens: (model(tokens).logits, []),
            lambda read: names(model, read), lambda w, x: plain.bert(w, x, 3))


if __name__ == "__main__":
    make("bert.safetensors", 20, build, masked_batches)
