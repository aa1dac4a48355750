"""Peak memory of a forward and backward pass over one long sequence (`torchrun sequence_memory.py OUTPUT TOKENS`).

Each rank writes to OUTPUT.RANK what torch had allocated at most, beyond weights and inputs, in bytes.
"""

import sys
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from rloo_pipeline.runtime import ranks
from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.sequence_group import group_of

SIZES = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 97}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def peak(tokens: int) -> int:
    """Bytes that the pass takes at most."""
    attention.register()
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, **HEADS, attn_implementation=attention.NAME, max_position_embeddings=tokens)
    module = TokenLogProbs(Qwen3ForCausalLM(config).train(), 1.0, group_of(ranks.current().world))
    pack = Sequences([[5] * (tokens // 4)], [[6] * (tokens - tokens // 4)]).pick([0], module.group)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        module(pack, lambda _, logps, mask, __: (logps * mask).mean()).backward()
    events: list = measured.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    output, tokens = Path(sys.argv[1]), int(sys.argv[2])
    torch.distributed.init_process_group("gloo")
    found = peak(tokens)
    Path(f"{output}.{ranks.current().number}").write_text(str(found))
