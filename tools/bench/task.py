"""The large shape as a run of its own: a Qwen3 of random weights whose tokens are words, prompts, a cheap reward.

large.yaml names these functions, and TRL gets the same model, prompts and reward. Nothing can be learned here: what is
measured is the time that so many steps take.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any


def words_qwen3(folder: Path, seed: int, *, vocabulary: int, context: int, **shape: Any) -> None:
    """Writes the model and a tokenizer that has a word for each of its tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from rloo_pipeline.demo.character_model import END, PAD, START, with_chat, write_qwen3

    names = [PAD, START, END, *(f"w{number}" for number in range(3, vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    write_qwen3(folder, seed, with_chat(tokenizer, context), **shape)


def prompts(size: int, seed: int, shortest: int, longest: int, vocabulary: int) -> list[dict[str, str]]:
    """Random words, from `shortest` to `longest` of them a prompt."""
    draw = random.Random(seed)

    def one() -> str:
        return " ".join(f"w{draw.randrange(3, vocabulary)}" for _ in range(draw.randint(shortest, longest)))

    return [{"prompt": one()} for _ in range(size)]


def even_tokens_reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Share of the tokens with an even number."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
