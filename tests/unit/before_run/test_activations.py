"""The activations that a plan predicts are those that torch keeps for the backward pass."""

from pathlib import Path

import pytest
import torch
from helpers import mini
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rloo_pipeline.artifacts import model_dims
from rloo_pipeline.before_run.memory import MicroBatch, RunMemory
from rloo_pipeline.config import Config
from rloo_pipeline.training import packing
from rloo_pipeline.training.kernels import attention
from rloo_pipeline.training.logprobs import TokenLogProbs

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "attn_implementation": attention.NAME}
SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
MODELS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "gemma2, with soft caps": (Gemma2ForCausalLM, Gemma2Config, {}),
    "gpt-oss, with sinks": (GptOssForCausalLM, GptOssConfig, {"num_local_experts": 2, "num_experts_per_tok": 1}),
}


def kept(model: torch.nn.Module, prompt: int, completion: int, samples: int) -> int:
    """Bytes that torch keeps for the backward pass of two groups of sequences, without weights."""
    storages, tensors = dict[int, int](), list[torch.Tensor]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)  # so that no other one gets its address
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    prompts = [[token] * prompt for token in (5, 6) for _ in range(samples)]
    pack = packing.pack(prompts, [[7] * completion] * len(prompts))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        TokenLogProbs(model.train(), 1.0)(pack, lambda _, logps, mask, __: -(logps * mask).sum())
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for address, size in storages.items() if address not in weights)


@pytest.mark.parametrize(
    ("name", "prompt", "completion", "samples"), [*((name, 8, 504, 1) for name in MODELS), ("qwen3", 480, 32, 16)]
)
def test_activations_are_those_that_torch_keeps(name, prompt, completion, samples) -> None:
    attention.register()
    kind, of_kind, more = MODELS[name]
    config = of_kind(**SIZES, **HEADS, **more, sliding_window=4096)
    keys = {"deepspeed": {"gradient_checkpointing": False}, "dataset": {"max_prompt_length": prompt}}
    run = Config(**mini(**keys, rollout={"max_completion_length": completion, "num_generations": max(4, samples)}))
    tokens, copies = prompt + samples * completion, samples * (prompt + completion)
    predicted = RunMemory(run, model_dims.read(Path(), config.to_dict()), "cuda").activations(
        MicroBatch(2 * tokens, 2 * samples * completion, several=False, copies=copies / tokens)
    )
    measured = kept(kind(config), prompt, completion, samples)
    assert measured <= predicted <= 1.5 * measured
