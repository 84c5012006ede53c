"""golden/huggingface/gpt_oss_mxfp4/: a tiny GPT-OSS as it is published, with experts in MXFP4, and unpacked.safetensors: what
transformers makes of every weight when it loads the folder, as bf16.

golden/huggingface/deepseek_v3_fp8/: a tiny DeepSeek-V3 as it is published, with matrices in FP8 whose blocks of 128 by 128 have
scales, the last ones smaller, and unpacked.safetensors: every weight in f32, by PyTorch's float8_e4m3fn."""
import json
import os
import shutil

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import huggingface
from common import GOLDEN

WIDTH, INNER, EXPERTS, GROUP = 64, 32, 4, 32


def folder_of(name):
    folder = os.path.join(GOLDEN, "huggingface", name)
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def save(model, folder):
    """A bf16 model with its tokenizer. Returns its tensors."""
    huggingface.redraw(model, np.random.default_rng(7))
    model.bfloat16().save_pretrained(folder)
    huggingface.save_tokenizer(folder)
    return load_file(os.path.join(folder, "model.safetensors"))


def with_quantization(folder, says):
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    config["quantization_config"] = says
    with open(path, "w") as file:
        json.dump(config, file, indent=2, sort_keys=True)


def mxfp4():
    folder, rng = folder_of("gpt_oss_mxfp4"), np.random.default_rng(11)
    model = huggingface.gpt_oss(hidden_size=WIDTH, intermediate_size=INNER)
    tensors = save(model, folder)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = rng.integers(0, 256, size=(experts, outputs, inputs // GROUP, GROUP // 2), dtype=np.uint8)
        scales = rng.integers(118, 126, size=(experts, outputs, inputs // GROUP), dtype=np.uint8)
        # Least numbers, and below the least normal one.
        scales[0, 0, 0], scales[0, 1, 0] = 0, 1
        tensors[name + "_blocks"], tensors[name + "_scales"] = torch.from_numpy(codes), torch.from_numpy(scales)
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    with_quantization(folder, {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]})
    loaded = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)).state_dict()
    for name in [name for name in tensors if name.endswith("_blocks")]:
        two = tensors[name], tensors[name.replace("_blocks", "_scales")]
        own = convert_moe_packed_tensors(*two, dtype=torch.float32)
        assert torch.equal(own.bfloat16().float(), own), "bf16 has every value"
        assert torch.equal(own, loaded[name.replace("_blocks", "")].float()), name
    finish(folder, loaded)


BLOCK = 128


def fp8():
    folder, rng = folder_of("deepseek_v3_fp8"), np.random.default_rng(12)
    # Of [160, 136] a matrix has four blocks.
    model = huggingface.deepseek_v3(intermediate_size=160, q_lora_rank=136, qk_nope_head_dim=36)
    tensors, unpacked = save(model, folder), {}
    packed = [name for name in tensors if name.endswith("_proj.weight") or "kv_a_proj" in name or "q_b_proj" in name]
    for name, weight in sorted(tensors.items()):
        if name not in packed:
            unpacked[name] = weight.float()
            continue
        rows, columns = weight.shape
        blocks = -(-rows // BLOCK), -(-columns // BLOCK)
        scales = torch.from_numpy(rng.uniform(1e-4, 2e-3, size=blocks)).float()
        # Every code but those of no number.
        codes = rng.integers(0, 254, size=(rows, columns), dtype=np.uint8)
        codes = torch.from_numpy(np.where(codes >= 127, codes + 1, codes).astype(np.uint8)).view(torch.float8_e4m3fn)
        assert torch.isfinite(codes.float()).all()
        whole = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        tensors[name], tensors[name + "_scale_inv"] = codes, scales
        unpacked[name] = codes.float() * whole
    shapes = [tuple(tensors[name + "_scale_inv"].shape) for name in packed]
    assert (2, 2) in shapes and (2, 1) in shapes and (1, 2) in shapes and (1, 1) in shapes, shapes
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    with_quantization(folder, {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                               "weight_block_size": [BLOCK, BLOCK]})
    finish(folder, unpacked)


def finish(folder, unpacked):
    unpacked = {name: value.contiguous().clone() for name, value in unpacked.items()}
    save_file(unpacked, os.path.join(folder, "unpacked.safetensors"), metadata={"format": "pt"})
    print(folder, sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)), "bytes")


if __name__ == "__main__":
    mxfp4()
    fp8()
