"""Peak memory of a forward and backward pass over one long sequence (`torchrun sequence_memory.py OUTPUT TOKENS`).

Each rank writes to OUTPUT.RANK how far its resident set rose above what it was with weights and inputs, in bytes.
"""

import os
import re
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.sequence_group import group_of

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 97}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def resident(peak: bool) -> int:
    """Bytes of the process in memory."""
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def peak(tokens: int) -> int:
    """Bytes that the pass takes at most."""
    attention.register()
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, **HEADS, attn_implementation=attention.NAME, max_position_embeddings=tokens)
    module = TokenLogProbs(Qwen3ForCausalLM(config).train(), 1.0, group_of(int(os.environ.get("WORLD_SIZE", "1"))))
    sequences = [Sequences([[5] * (count // 4)], [[6] * (count - count // 4)]) for count in (64, tokens)]
    risen = 0
    for sequence in sequences:  # the short one loads what every pass needs
        pack = sequence.pick([0], module.group)
        before = resident(peak=False)
        Path("/proc/self/clear_refs").write_text("5")
        module(pack, lambda _, logps, mask, __: (logps * mask).mean()).backward()
        risen = resident(peak=True) - before
    return risen


if __name__ == "__main__":
    torch.set_num_threads(1)
    output, tokens = Path(sys.argv[1]), int(sys.argv[2])
    torch.distributed.init_process_group("gloo")
    risen = peak(tokens)
    Path(f"{output}.{torch.distributed.get_rank()}").write_text(str(risen))
