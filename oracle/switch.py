"""golden/switch.safetensors: transformers' Switch Transformers: biases of distances, scores that are not scaled, no other
biases, a tied head behind a scale; the second feed-forward of each stack is a mixture of experts, of which a token visits
one. A row is 12 tokens of a source, which the encoder reads, and then 16 of a target."""
import common
common.TOP_K = 1
import torch
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

import plain
from common import D, EXPERTS, S, V, make
from nllb_moe import FIRST, SOURCE, pairs

HEADS, HEAD_DIM, INNER = 3, 8, 40


def names(model, read):
    """Our names -> tensors [out,in]."""
    out = {"model.embed_tokens.weight": read(model.shared.weight)}
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        bias = stack.block[0].layer[0].SelfAttention.relative_attention_bias
        out[f"model.{name}.relative_attention_bias.weight"] = read(bias.weight)
        for i, block in enumerate(stack.block):
            at = f"model.{name}.layers.{i}"
            parts = [("self_attn", block.layer[0].SelfAttention, block.layer[0])]
            if name == "decoder":
                parts.append(("encoder_attn", block.layer[1].EncDecAttention, block.layer[1]))
            for part, attention, layer in parts:
                for x in "qkvo":
                    out[f"{at}.{part}.{x}_proj.weight"] = read(getattr(attention, x).weight)
                out[f"{at}.{part}_layer_norm.weight"] = read(layer.layer_norm.weight)
            last = block.layer[-1]
            out[at + ".final_layer_norm.weight"] = read(last.layer_norm.weight)
            if not last.is_sparse:
                dense = [(at + ".mlp", last.mlp)]
            else:
                out[at + ".block_sparse_moe.gate.weight"] = read(last.mlp.router.classifier.weight)
                dense = [(f"{at}.block_sparse_moe.experts.{e}", last.mlp.experts[f"expert_{e}"])
                         for e in range(EXPERTS)]
            for x, mlp in dense:
                out[x + ".fc_in.weight"], out[x + ".fc_out.weight"] = read(mlp.wi.weight), read(mlp.wo.weight)
        out[f"model.{name}.layer_norm.weight"] = read(stack.final_layer_norm.weight)
    return out


def build():
    model = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(
        vocab_size=V, d_model=D, d_kv=HEAD_DIM, d_ff=INNER, expert_capacity=S, num_layers=2,
        num_sparse_encoder_layers=1, num_decoder_layers=2, num_sparse_decoder_layers=1, num_heads=HEADS,
        num_experts=EXPERTS, router_jitter_noise=0.0, dropout_rate=0.0, layer_norm_epsilon=1e-5,
        tie_word_embeddings=True, attn_implementation="eager", pad_token_id=1, eos_token_id=None,
        decoder_start_token_id=FIRST)).float().train()
    assert model.lm_head.weight is model.shared.weight
    assert len(list(model.parameters())) == len(names(model, lambda p: p)), \
        set(n for n, _ in model.named_parameters())
    routers = [m for m in model.modules() if type(m).__name__ == "SwitchTransformersTop1Router"]
    assert len(routers) == 2
    seen = {}
    for router in routers:
        router.register_forward_hook(lambda m, _, out: seen.__setitem__(m, out[2]))

    def forward(tokens):
        source = tokens[:, :SOURCE]
        logits = model(input_ids=source, decoder_input_ids=tokens[:, SOURCE:], use_cache=False).logits
        of = [seen[router].reshape(-1, EXPERTS) for router in routers]
        return logits, [(of[0], torch.ones_like(source, dtype=torch.bool)), of[1]]

    return (model, forward, lambda read: names(model, read),
            lambda w, x: plain.encoder_decoder(w, x[:, :SOURCE], x[:, SOURCE:], HEADS))


if __name__ == "__main__":
    make("switch.safetensors", 5, build, pairs, idle=True)
