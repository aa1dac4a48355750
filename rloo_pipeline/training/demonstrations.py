"""Demonstrations as token ids, split into those for SFT and held-out ones. Used by `warmstart` and `checks`.

A demonstration with tools is an episode: messages of the assistant, with tool answers between them. Each of its turns
is one demonstration here. Its prompt is everything before it, in exactly the token ids that an episode has.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import (
    OBSERVATION,
    PromptSet,
    ToolSets,
    held_out_part,
    rows_of,
    tool_sets,
    tools_of,
)
from rloo_pipeline.config import Config, Sft
from rloo_pipeline.data import prompting
from rloo_pipeline.data.prompting import COMPLETION
from rloo_pipeline.data.rows import Row, read_rows
from rloo_pipeline.data.tool_template import Message, ToolTemplate
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.progress import say, track
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.training.packing import Sequences

PromptIds = tuple[int, ...]
Pair = tuple[list[int], list[int]]


class Demonstrations(NamedTuple):
    """Prompts and completions; completions include the end token."""

    trained: Sequences
    held_out: list[Pair]
    """Demonstrations of evaluation prompts, plus `warmstart.sft.held_out` random others."""


def demonstrations(config: Config, section: Sft, path: str, model: Policy, prompts: Path) -> Demonstrations:
    """Tokenizes the demonstrations and holds out some.

    Args:
        config: configuration of the run.
        section: the section `warmstart.sft`.
        path: file with the rows.
        model: the model whose tokenizer is used.
        prompts: folder of the prompt sets.

    Raises:
        UserError: a column is missing, a prompt lacks the text that the environment's `reset` returned, a completion
            spells an end token, or no demonstration is left to train on.
    """
    parts = {prompts / "eval", held_out_part(prompts)}
    held = (PromptSet(part).table for part in parts)
    asked = ("prompt", "prompt_ids", "environment")
    questions = (table.select([name for name in asked if name in table.column_names]) for table in held)
    evaluated = evaluated_prompts(row for table in questions for row in rows_of(table))
    observed = _with_observations([*parts, prompts / "train"])
    template = ToolTemplate(model, config.dataset)
    rows = read_rows(section.demonstrations, path)
    pairs, held_out = tokenized(rows, path, section, template, evaluated, observed, tool_sets(prompts))
    if held_out:
        count = len(held_out) + len(pairs)
        say(f"demonstrations: held out {len(held_out)} of {count}, because their prompts are evaluation prompts")
    drawn = set(permutation(len(pairs), derive(config.seed, "sft", "held out"))[: section.held_out])
    held_out += [pairs[i] for i in sorted(drawn)]
    columns: list[Any] = [*zip(*(pair for i, pair in enumerate(pairs) if i not in drawn), strict=True)]
    return Demonstrations(Sequences(*columns), held_out)


def evaluated_prompts(rows: Iterable[Row]) -> set[PromptIds | str]:
    """The token ids and the wordings of these prompts."""
    return {key for row in rows for key in (tuple(row["prompt_ids"]), _worded(row["prompt"], row))}


def _worded(prompt: Any, row: Row) -> str:
    """The wording of a prompt, with the environment, which decides its tools."""
    return f"{prompting.wording(prompt)} {row.get('environment')}"


def tokenized(
    rows: Sequence[Row],
    path: str,
    section: Sft,
    template: ToolTemplate,
    evaluated: Collection[PromptIds | str],
    observed: Collection[PromptIds],
    tools: ToolSets,
) -> tuple[list[Pair], list[Pair]]:
    """Tokenizes demonstrations; returns those to train on, and those with evaluation prompts.

    Args:
        rows: demonstrations.
        path: file of the demonstrations, for messages.
        section: the section `warmstart.sft`.
        template: the model's template.
        evaluated: the evaluation prompts, by `evaluated_prompts`.
        observed: token ids of all prompts if the environment's `reset` adds a text to them, else empty.
        tools: the tools of the prompts.

    Raises:
        UserError: see `demonstrations`.
    """
    pairs: list[Pair] = []
    held_out: list[Pair] = []
    prompting.check_column(section.completion_column, rows[0], COMPLETION, path)
    for number, row in enumerate(track(rows, "tokenizing demonstrations", len(rows))):
        where = f"{path}, row {number}"
        asked = prompting.prompt_of(row, template.dataset, where)
        ids = prompting.encode(asked, template.dataset, template.tokenizer, where, tools_of(tools, row))
        if observed and tuple(ids) not in observed:
            raise UserError(
                f"{where}: its prompt is not one of this run's, which end with the text that the environment's `reset` "
                "returns; end it with that text, or drop the row"
            )
        messages = prompting.completion_messages(row, section.completion_column, where)
        turns = list(_turns(ids, messages, template))
        _check_turns(turns, template, where)
        is_evaluated = tuple(ids) in evaluated or _worded(asked, row) in evaluated
        (held_out if is_evaluated else pairs).extend(turns)
    if len(pairs) <= section.held_out:
        why = "lower warmstart.sft.held_out" if pairs else "all have evaluation prompts"
        raise UserError(f"{path}: no demonstration is left to train on; {why}")
    return pairs, held_out


def _with_observations(parts: Sequence[Path]) -> set[PromptIds]:
    """The ids of all prompts, if `reset` of an environment returned a text for any of them; else none."""
    tables = [PromptSet(part).table for part in parts]
    texts = (text for table in tables if OBSERVATION in table.column_names for text in table[OBSERVATION].to_pylist())
    return {tuple(ids) for table in tables for ids in table["prompt_ids"].to_pylist()} if any(texts) else set()


def _check_turns(turns: Sequence[Pair], template: ToolTemplate, where: str) -> None:
    """Checks that the model's turns contain no end token except at their end, and only tokens that it can embed.

    Raises:
        UserError: a completion spells an end token, or has a token without a row in the embedding.
    """
    for _, turn in turns:
        prompting.check_embedded(turn, template.tokenizer, where)
        end = next((token for token in turn[:-1] if token in template.stop_ids), None)
        if end is not None:
            raise UserError(
                f"{where}: a completion ({COMPLETION}) spells {template.tokenizer.convert_ids_to_tokens(end)!r}, which "
                "ends a turn; remove it, since the end token is added to every completion"
            )


def _turns(prompt_ids: list[int], messages: Sequence[Message], template: ToolTemplate) -> Iterator[Pair]:
    """Yields each turn of the model in a demonstration, after the ids that precede it."""
    ids, called = prompt_ids, list[str]()
    for role, group in groupby(messages, key=lambda message: message["role"]):
        if role == "assistant":
            for message in group:
                called = [call["function"]["name"] for call in message.get("tool_calls") or ()]
                text = template.turn_text(message) if called else message["content"]
                tokenizer = template.tokenizer
                turn = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
                yield ids, turn
                ids = [*ids, *turn]
        else:
            ids = [*ids, *template.continuation(called, [str(message["content"]) for message in group])]
