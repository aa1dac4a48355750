"""The models, batches and settings that comparisons get: random weights, random tokens, fixed by a seed."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rloo_pipeline.training.settings import TrainerSettings
K = 4
STEP = "update_step_share/"
"""Before an operation's name in bench.json: its share of the CPU time of an optimizer step."""


class Shape(NamedTuple):
    """A model and the batch of one update."""

    vocabulary: int
    hidden: int
    layers: int
    prompts: int
    prompt_tokens: tuple[int, int]
    completion_tokens: tuple[int, int]
    steps: int
    """Of a repetition: a short step by itself says little."""


SHAPES = {
    # the vocabulary of Qwen3, and lengths as of GSM8K
    "large": Shape(151_936, 512, 8, 2, (60, 120), (30, 220), 1),
    "small": Shape(512, 64, 4, 48, (10, 20), (8, 40), 7),
}


def model(shape: Shape, folder: Path) -> None:
    """Writes a Qwen3 of the shape as a policy."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 32,
        num_key_value_heads=shape.hidden // 64,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def batch(shape: Shape) -> tuple[list[list[int]], list[list[int]], list[float]]:
    """Prompts (one a group), completions (K a prompt, neighbours) and rewards."""
    draw = random.Random(0)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(2, shape.vocabulary) for _ in range(draw.randint(low, high))]

    prompts = [tokens(*shape.prompt_tokens) for _ in range(shape.prompts)]
    completions = [tokens(*shape.completion_tokens) for _ in range(shape.prompts * K)]
    return prompts, completions, [draw.random() for _ in completions]


def settings(rate: float, **changes: Any) -> TrainerSettings:
    """Settings of our trainer: AdamW in float32 at a constant rate; `changes` are keys of `deepspeed`, and `dtype`."""
    from rloo_pipeline.config import Deepspeed
    from rloo_pipeline.training.settings import LearningRate, TrainerSettings

    dtype = changes.pop("dtype", "float32")
    return TrainerSettings(dtype, LearningRate(rate), adam_betas=(0.9, 0.999), deepspeed=Deepspeed(**changes))


if __name__ == "__main__":  # shapes.py SHAPE FOLDER
    model(SHAPES[sys.argv[1]], Path(sys.argv[2]))
