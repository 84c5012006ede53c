"""golden/lora_mixtral.safetensors, golden/lora_llama.safetensors: PEFT's adapters on transformers' Mixtral and Llama,
trained alone: on some projections and all experts, and on all projections.

Needs peft==0.21.2. PEFT has the experts of a layer in one adapter, a stacked parameter [experts, out, in] each: row e r + i
of A and column i E + e of B are expert e's."""
import torch
from peft import LoraConfig, get_peft_model

import llama
import mixtral
import plain
from common import D, EXPERTS, make, redraw

RANK, ALPHA = 3, 6.0
SCALE = ALPHA / RANK
INNER = mixtral.INNER


def adapted(out, model, read):
    """Adapters by our names."""
    for i, layer in enumerate(model.model.layers):
        at = f"model.layers.{i}"
        for path, module in layer.named_modules():
            if not hasattr(module, "lora_A") or "experts" in path:
                continue
            for factor in ("lora_A", "lora_B"):
                out[f"{at}.{path}.{factor}.weight"] = read(getattr(module, factor)["default"].weight)
        if hasattr(layer.mlp, "experts"):
            outer = layer.mlp.experts
            experts(out, f"{at}.block_sparse_moe.experts", outer.base_layer, read, ("w1", "w3"), "w13")
            experts(out, f"{at}.block_sparse_moe.experts", outer, read, ("w2",), "w2")


def experts(out, at, module, read, parts, name):
    assert module.parameter_name == ("down_proj" if name == "w2" else "gate_up_proj")
    a, b = (read(getattr(module, factor)["default"].weight) for factor in ("lora_A", "lora_B"))
    for e in range(EXPERTS):
        out[f"{at}.{e}.{name}.lora_A.weight"] = a[e * RANK:(e + 1) * RANK]
        for part, rows in zip(parts, b.chunk(len(parts))):
            out[f"{at}.{e}.{part}.lora_B.weight"] = rows[:, e::EXPERTS]


def merged(w):
    """The weights of which an adapted model is made."""
    out = {name: value for name, value in w.items() if "lora_" not in name}
    for name in [name for name in w if name.endswith("lora_B.weight")]:
        matrix = name[:-len(".lora_B.weight")]
        shared = matrix[:-1] + "13" if matrix.endswith((".w1", ".w3")) else matrix
        out[matrix + ".weight"] = out[matrix + ".weight"] + SCALE * w[name] @ w[shared + ".lora_A.weight"]
    return out


def build(kind, base_names, targets, parameters):
    """Weights of the base are drawn by a seed of their own, adapters by that of the routing."""
    import numpy as np

    base, _, _, _ = kind.build()
    redraw(base, np.random.default_rng(5))
    names = {name: p.detach().clone() for name, p in base_names(base, lambda p: p).items()}
    model = get_peft_model(base, LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=targets, target_parameters=parameters)).train()
    inner = model.base_model.model

    def forward(tokens):
        if parameters is None:
            return model(input_ids=tokens, use_cache=False).logits, []
        out = model(input_ids=tokens, use_cache=False, output_router_logits=True)
        return out.logits, list(out.router_logits)

    def named(read):
        out = {} if read(inner.model.norm.weight) is None else dict(names)
        adapted(out, inner, read)
        return out

    return model, forward, named, lambda w, x: plain.forward(merged(w), x, 4, 2)


if __name__ == "__main__":
    make("lora_llama.safetensors", 40, lambda: build(
        llama, llama.names, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], None))
    make("lora_mixtral.safetensors", 661, lambda: build(
        mixtral, mixtral.names, ["q_proj", "v_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
