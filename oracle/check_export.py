"""Loads with transformers what `guildhall convert` made of the golden folders and of checkpoints made of them, and compares
logits with the stored ones: python -B oracle/check_export.py target/release/guildhall"""
import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from common import GOLDEN
from huggingface import FAMILIES, logits, patch


def distance(folder, dtype, numbers):
    stacked = AutoConfig.from_pretrained(folder).is_encoder_decoder
    kind = AutoModelForSeq2SeqLM if stacked else AutoModelForCausalLM
    model, report = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
    patch(model)
    got, want = logits(model, numbers["tokens"].long()).float(), numbers["logits"]
    return ((got - want).norm() / want.norm()).item()


if __name__ == "__main__":
    program = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            start = os.path.join(GOLDEN, "huggingface", family)
            numbers = load_file(os.path.join(start, "logits.safetensors"))
            own, back, half = (os.path.join(folder, family + end) for end in ("-own", "-back", "-half"))
            for step in ([start, own], [own, back], [own, half, "--dtype", "bf16"]):
                subprocess.run([program, "convert", *step], check=True, capture_output=True)
            figures = [distance(back, torch.float32, numbers), distance(half, torch.float32, numbers)]
            # Of 24 tokens rounded weights send one of DeepSeek-V3's to another expert, and its logits elsewhere.
            assert figures[0] < 1e-6 and figures[1] < 0.1, (family, figures)
            print(f"{family:20} f32 {figures[0]:.1e}   bf16 weights {figures[1]:.1e}")
