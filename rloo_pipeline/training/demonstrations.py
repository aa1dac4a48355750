"""Demonstrations as token ids, split into those SFT trains on and held-out ones. Used by `warmstart` and `checks`."""

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
    """Prompts and completions; completions include the end token."""

    trained: Sequences
    held_out: list[Pair]
    """Demonstrations of evaluation prompts, plus `warmstart.sft.held_out` others drawn by the seed."""


def demonstrations(config: Config, section: Sft, path: str, model: Path, prompts: Path) -> Demonstrations:
    """Tokenizes the demonstrations and holds out some.

    Args:
        config: configuration of the run.
        section: the section `warmstart.sft`.
        path: file with the rows.
        model: folder of the model, for its tokenizer.
        prompts: folder of the prompt sets.

    Raises:
        UserError: a column is missing, or no demonstration is left to train on.
    """
    tokenizer = policy.load_tokenizer(model, config.model.trust_remote_code)
    evaluated = {tuple(ids) for ids in PromptSet(prompts / "eval").table["prompt_ids"].to_pylist()}
    rows = read_rows(section.demonstrations, path)
    pairs: list[Pair] = []
    held_out: list[Pair] = []
    check_column(section.completion_column, rows[0], COMPLETION, path)
    for number, row in enumerate(track(rows, "tokenizing demonstrations", len(rows))):
        where = f"{path}, row {number}"
        ids = encode(prompt_of(row, config.dataset, where), config.dataset, tokenizer, where)
        text = completion_text(row, section.completion_column, where)
        pair = ids, [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        (held_out if tuple(ids) in evaluated else pairs).append(pair)
    if held_out:
        say(f"demonstrations: held out {len(held_out)} of {len(rows)}, because their prompts are evaluation prompts")
    drawn = set(permutation(len(pairs), derive(config.seed, "sft", "held out"))[: section.held_out])
    held_out += [pairs[i] for i in sorted(drawn)]
    pairs = [pair for i, pair in enumerate(pairs) if i not in drawn]
    if not pairs:
        why = "all have evaluation prompts" if not section.held_out else "lower warmstart.sft.held_out"
        raise UserError(f"{path}: no demonstration is left to train on; {why}")
    return Demonstrations(Sequences(*zip(*pairs, strict=True)), held_out)
