"""Completions for the report, drawn by the run's seed and not by hand: held-out ones side by side, and rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.evaluation import completions as seen
from rloo_pipeline.seeds import derive, permutation

CASES = 20
"""Held-out prompts whose completions are shown."""
GROUPS = 6
"""Prompts shown of each of the first, the middle and the last round."""
SIBLINGS = 8
"""Completions shown of a group, the first ones."""
LONGEST = 6000
"""Characters shown of a text; of a longer one its begin and its end."""

Messages = list[dict[str, str]]


class Answer(NamedTuple):
    """One completion as the page shows it."""

    text: str
    right: bool
    rewards: dict[str, float | None]
    finish_reason: str
    tokens: int
    advantage: float | None = None
    """What the update made of it; None in evaluations."""


class Case(NamedTuple):
    """A held-out prompt and what the two policies made of it with the same seed."""

    messages: Messages
    warmstart: Answer
    final: Answer


class Group(NamedTuple):
    """A prompt of a round and its completions."""

    round: int
    messages: Messages
    answers: list[Answer]
    left_out: int
    """Completions that are not shown."""


def cases(config: Config, run: Path) -> list[Case]:
    """Some held-out prompts and the first completion of each policy.

    Raises:
        UserError: the two evaluations are not of the same prompts.
    """
    files = {name: run / "evaluation" / name / "completions.parquet" for name in ("warmstart", "final")}
    found = {name: tables.read(file, "completions") for name, file in files.items()}
    tables.check_aligned(found["warmstart"], found["final"], str(files["final"]))
    samples = config.evaluation.num_generations
    drawn = sorted(permutation(found["final"].num_rows // samples, derive(config.seed, "report"))[:CASES])
    ids = found["final"]["prompt_id"].take([place * samples for place in drawn]).to_pylist()
    prompts = PromptSet(run / "prompts" / "eval").by_id(ids)
    before, after = (_answers(config, table.take([place * samples for place in drawn])) for table in found.values())
    return [Case(_messages(prompts[key]["prompt"]), *pair) for key, *pair in zip(ids, before, after, strict=True)]


def groups(config: Config, run: Path) -> list[Group]:
    """Some prompts of the first, the middle and the last round, with rewards and advantages.

    Raises:
        UserError: a table of such a round is damaged, or the tables do not belong together.
    """
    rounds = sorted({1, (config.rounds + 1) // 2, config.rounds})
    return [group for number in rounds for group in _of_round(config, run, number)]


def _of_round(config: Config, run: Path, number: int) -> list[Group]:
    folder = run / "rounds" / f"{number:05d}"
    shards = sorted((folder / "rollouts").glob("*.parquet"))
    if not shards:
        return []
    rolled = tables.read_all(shards, "rollouts")
    scored = tables.read_all([folder / "scores" / shard.name for shard in shards], "scores")
    tables.check_aligned(rolled, scored, str(folder / "scores"))
    trained = tables.read(folder / "train.parquet", "train").to_pylist()
    advantages = {(row["prompt_id"], row["sample"]): row["advantage"] for row in trained}
    whole = pa.table({**_columns(rolled), **_columns(scored)})
    ids = list(dict.fromkeys(rolled["prompt_id"].to_pylist()))
    samples = len(rolled) // len(ids)
    drawn = sorted(permutation(len(ids), derive(config.seed, "report", number))[:GROUPS])
    prompts = PromptSet(run / "prompts" / "train").by_id([ids[place] for place in drawn])
    found = []
    for place in drawn:
        rows = whole.slice(place * samples, min(samples, SIBLINGS))
        answers = _answers(config, rows)
        known = [advantages.get((ids[place], sample)) for sample in rows["sample"].to_pylist()]
        answers = [one._replace(advantage=value) for one, value in zip(answers, known, strict=True)]
        found.append(Group(number, _messages(prompts[ids[place]]["prompt"]), answers, samples - len(answers)))
    return found


def _columns(table: pa.Table) -> dict[str, Any]:
    return {name: table[name] for name in table.column_names}


def _answers(config: Config, rows: pa.Table) -> list[Answer]:
    """Completions with scores, as the page shows them."""
    right = seen.right(rows, config.rewards, config.correct, 1)
    names = [*(reward.column for reward in config.rewards), "reward"]
    return [
        Answer(
            _shown(row["completion"]),
            bool(right[place, 0]),
            {n: row[n] for n in names},
            row["finish_reason"],
            len(row["completion_ids"]),
        )
        for place, row in enumerate(rows.to_pylist())
    ]


def _shown(text: str) -> str:
    """A text, or its two ends."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"


def _messages(prompt: str | Messages) -> Messages:
    return [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
