"""Demonstrations as token ids, those that SFT trains on and those that it does not: for `warmstart` and `checks`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.artifacts import policy
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config, Sft
from rloo_pipeline.data.prompting import COMPLETION, check_column, completion_text, encode, prompt_of
from rloo_pipeline.data.rows import read_rows
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.progress import say, track
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.training.packing import Sequences

Pair = tuple[list[int], list[int]]


class Demonstrations(NamedTuple):
    """Prompts and completions, the end token included."""

    trained: Sequences
    held_out: list[Pair]
    """Of evaluation prompts, and `warmstart.sft.held_out` others, drawn with the seed."""


def demonstrations(config: Config, section: Sft, path: str, model: Path, prompts: Path) -> Demonstrations:
    """All demonstrations.

    Raises:
        UserError: a column is missing, or none is left to train on.
    """
    tokenizer = policy.load_tokenizer(model, config.model.trust_remote_code)
    evaluated = {tuple(ids) for ids in PromptSet(prompts / "eval").table["prompt_ids"].to_pylist()}
    rows = read_rows(section.demonstrations, path)
    pairs: list[Pair] = []
    held_out: list[Pair] = []
    check_column(section.completion_column, rows[0], COMPLETION, path)
    for number, row in enumerate(track(rows, "tokenizing demonstrations", len(rows))):
        place = f"{path}, row {number}"
        ids = encode(prompt_of(row, config.dataset, place), config.dataset, tokenizer, place)
        text = completion_text(row, section.completion_column, place)
        pair = ids, [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        (held_out if tuple(ids) in evaluated else pairs).append(pair)
    if held_out:
        say(f"demonstrations: {len(held_out)} of {len(rows)} left out, since they are of evaluation prompts")
    kept_out = set(permutation(len(pairs), derive(config.seed, "sft", "held out"))[: section.held_out])
    held_out += [pairs[place] for place in sorted(kept_out)]
    pairs = [pair for place, pair in enumerate(pairs) if place not in kept_out]
    if not pairs:
        why = "all are of evaluation prompts" if not section.held_out else "see warmstart.sft.held_out"
        raise UserError(f"{path}: no demonstration is left; {why}")
    return Demonstrations(Sequences(*zip(*pairs, strict=True)), held_out)
