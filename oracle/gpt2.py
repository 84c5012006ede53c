"""golden/gpt2.safetensors: transformers' GPT-2, tied head, dense."""
from transformers import GPT2Config, GPT2LMHeadModel

import plain
from common import D, S, V, make


def config(tied):
    return GPT2Config(
        vocab_size=V, n_positions=S, n_embd=D, n_layer=2, n_head=3, n_inner=4 * D,
        activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=tied,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
        bos_token_id=0, eos_token_id=0)


def names(model, read):
    """Our names -> tensors [out,in]; Conv1D keeps [in,out], so its weights are transposed."""
    t = model.transformer
    out = {"model.embed_tokens.weight": read(t.wte.weight),
           "model.embed_positions.weight": read(t.wpe.weight)}

    def affine(name, module):
        out[name + ".weight"], out[name + ".bias"] = read(module.weight), read(module.bias)

    def conv(name, module):
        out[name + ".weight"], out[name + ".bias"] = read(module.weight).T, read(module.bias)

    for i, block in enumerate(t.h):
        at = f"model.layers.{i}"
        affine(at + ".input_layernorm", block.ln_1)
        for j, x in enumerate("qkv"):
            part = slice(j * D, (j + 1) * D)
            out[f"{at}.self_attn.{x}_proj.weight"] = read(block.attn.c_attn.weight)[:, part].T
            out[f"{at}.self_attn.{x}_proj.bias"] = read(block.attn.c_attn.bias)[part]
        conv(at + ".self_attn.o_proj", block.attn.c_proj)
        affine(at + ".post_attention_layernorm", block.ln_2)
        if hasattr(block.mlp, "c_fc"):
            conv(at + ".mlp.fc_in", block.mlp.c_fc)
            conv(at + ".mlp.fc_out", block.mlp.c_proj)
        else:
            out[at + ".block_sparse_moe.gate.weight"] = read(block.mlp.gate.weight)
            for e, x in enumerate(block.mlp.experts):
                affine(f"{at}.block_sparse_moe.experts.{e}.fc_in", x.fc_in)
                affine(f"{at}.block_sparse_moe.experts.{e}.fc_out", x.fc_out)
    affine("model.norm", t.ln_f)
    if model.lm_head.weight is not t.wte.weight:
        out["lm_head.weight"] = read(model.lm_head.weight)
    return out


def build():
    model = GPT2LMHeadModel(config(tied=True)).float().train()
    assert model.lm_head.weight is model.transformer.wte.weight
    return (model, lambda tokens: (model(tokens, use_cache=False).logits, []),
            lambda read: names(model, read), lambda w, x: plain.forward(w, x, 3, 3))


if __name__ == "__main__":
    make("gpt2.safetensors", 10, build)
