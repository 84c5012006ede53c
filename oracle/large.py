"""A Mixtral of 1.1 G random parameters (4.5 GB in f32), in shards as Hugging Face has them, to measure conversions with:
python -B oracle/large.py FOLDER"""
import json
import os
import shutil
import sys

import numpy as np
from safetensors.numpy import save_file

WIDTH, EXPERT, EXPERTS, LAYERS, VOCAB, HEADS, KV_HEADS = 1024, 3584, 8, 12, 32000, 16, 4
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden", "huggingface", "mixtral")
rng = np.random.default_rng(1)


def random(*shape):
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)


def layer(i):
    at = f"model.layers.{i}."
    kv = KV_HEADS * WIDTH // HEADS
    tensors = {at + f"self_attn.{x}_proj.weight": random(n, WIDTH) for x, n in zip("qkvo", (WIDTH, kv, kv, WIDTH))}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[at + norm + ".weight"] = random(WIDTH)
    tensors[at + "block_sparse_moe.gate.weight"] = random(EXPERTS, WIDTH)
    for e in range(EXPERTS):
        for w, shape in (("w1", (EXPERT, WIDTH)), ("w2", (WIDTH, EXPERT)), ("w3", (EXPERT, WIDTH))):
            tensors[at + f"block_sparse_moe.experts.{e}.{w}.weight"] = random(*shape)
    return tensors


if __name__ == "__main__":
    folder = sys.argv[1]
    os.makedirs(folder)
    where, total = {}, 0
    for number in range(LAYERS + 1):
        tensors = layer(number) if number < LAYERS else {
            "model.embed_tokens.weight": random(VOCAB, WIDTH), "lm_head.weight": random(VOCAB, WIDTH),
            "model.norm.weight": random(WIDTH)}
        file = f"model-{number + 1:05}-of-{LAYERS + 1:05}.safetensors"
        save_file(tensors, os.path.join(folder, file), metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": where}, file)
    with open(os.path.join(GOLDEN, "config.json")) as file:
        config = json.load(file)
    config.update(hidden_size=WIDTH, intermediate_size=EXPERT, num_local_experts=EXPERTS, num_hidden_layers=LAYERS,
                  vocab_size=VOCAB, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=4096)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    shutil.copy(os.path.join(GOLDEN, "tokenizer.json"), folder)
    print(total, "bytes of tensors")
