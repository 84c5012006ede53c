"""Whether PEFT reads the adapters that `guildhall convert --to peft` writes, and computes with them what transformers
computes with the weights that `--to hf` makes of them: of each family whose modules are those of adapters.

    python -B oracle/check_adapters.py target/release/guildhall

Needs peft==0.21.2 besides what `README.md` names. A run of a few steps trains the adapters on a text of the words of the
golden tokenizers."""
import os
import subprocess
import sys
import tempfile

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common import GOLDEN
from huggingface import FIRST, SEQ, VOCAB, logits

FAMILIES = ("mixtral", "llama", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss")
RECIPE = """
[train]
init = "{start}"
steps = 5
batch_tokens = 96
lr = 1e-2

[lora]
rank = 3
alpha = 6
experts = {experts}

[data]
sources = ["{text}"]
tokenizer = "{start}/tokenizer.json"
"""
SECTIONS = ("model", "moe")


def recipe(program, start, text, experts):
    """With the sections that `convert` reads out of the model's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        own = os.path.join(folder, "own")
        subprocess.run([program, "convert", start, own], check=True, capture_output=True)
        kept = open(os.path.join(own, "config.toml")).read()
    parts = [part for part in ("\n" + kept).split("\n[") if part.split("]")[0].split(".")[0] in SECTIONS]
    return RECIPE.format(start=start, text=text, experts=str(experts).lower()) + "".join(f"\n[{part}\n" for part in parts)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def apart(got, want):
    return ((got - want).norm() / want.norm()).item()


if __name__ == "__main__":
    program = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        at = lambda name: os.path.join(folder, name)
        with open(at("text.txt"), "w") as file:
            for n in range(300):
                file.write(" ".join(f"w{FIRST + (7 * n + i * i) % (VOCAB - FIRST)}" for i in range(SEQ)) + "\n")
        for family in FAMILIES:
            start = os.path.join(GOLDEN, "huggingface", family)
            tokens = load_file(os.path.join(start, "logits.safetensors"))["tokens"].long()
            with open(at(family + ".toml"), "w") as file:
                file.write(recipe(program, start, at("text.txt"), family != "llama"))
            run = at(family + "-run")
            subprocess.run([program, "train", at(family + ".toml"), "--set", f"run.dir={run}"], check=True,
                           capture_output=True, cwd=folder)
            for layout in ("peft", "hf"):
                subprocess.run([program, "convert", run, at(f"{family}-{layout}"), "--to", layout], check=True,
                               capture_output=True)
            base = load(start)
            plain = logits(base, tokens)
            adapted = PeftModel.from_pretrained(base, at(family + "-peft"))
            names = {name for name, _ in adapted.named_parameters() if "lora_" in name}
            stored = load_file(os.path.join(at(family + "-peft"), "adapter_model.safetensors"))
            assert names == {name.replace(".weight", ".default.weight") for name in stored}, names ^ set(stored)
            got, want = logits(adapted, tokens), logits(load(at(family + "-hf")), tokens)
            figures = [apart(got, want), apart(got, plain)]
            assert figures[0] < 1e-6 < 1e-2 < figures[1], (family, figures)
            print(f"{family:10} PEFT from merged {figures[0]:.1e}   adapted from plain {figures[1]:.1e}")
