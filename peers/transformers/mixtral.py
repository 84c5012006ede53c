"""A training step of Hugging Face's MixtralForCausalLM at the decoder's sizes, from random weights.

--impl chooses how transformers runs the experts: eager (a loop) or grouped_mm."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "pytorch"))
import common

flags = common.parser(__doc__)
flags.add_argument("--impl", default="grouped_mm", choices=["eager", "grouped_mm"])
flags = flags.parse_args()
common.enter(flags)

import torch
import transformers

import train


class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = transformers.MixtralForCausalLM(config)

    def forward(self, tokens):
        return self.inner(input_ids=tokens, labels=tokens).loss


torch.set_num_threads(flags.threads)
torch.manual_seed(0)
config = transformers.MixtralConfig(
    vocab_size=train.VOCAB, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=train.SEQ, num_local_experts=8, num_experts_per_tok=2,
    output_router_logits=True, router_aux_loss_coef=0.01, tie_word_embeddings=False, use_cache=False,
    pad_token_id=None, bos_token_id=None, eos_token_id=None)
config._experts_implementation = flags.impl
model = Model(config)
used = getattr(model.inner.config, "_experts_implementation", None)
workload = f"moe d256 L4 F1024 E8 k2 V{train.VOCAB} b{train.ROWS}x{train.SEQ} f32 x1"
train.run(model, f"transformers-{transformers.__version__}-{used}/torch-{torch.__version__}", workload, flags,
          notes="rotary positions")
