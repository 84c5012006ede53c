"""Makes every golden file, one program after the other."""
import pathlib
import subprocess
import sys

here = pathlib.Path(__file__).parent
for name in ("ops", "gpt2", "gpt2_moe", "llama", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "bert", "bert_moe",
             "transformer_xl", "transformer_xl_moe", "nllb_moe", "switch", "auxiliary", "scores",
             "huggingface", "packed", "lora", "chat", "hub"):
    subprocess.run([sys.executable, "-B", here / f"{name}.py"], check=True)
