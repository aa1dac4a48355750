"""report.html: one self-contained page of a run, read from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from rloo_pipeline import tables
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.files import read_json
from rloo_pipeline.insight import completions as seen
from rloo_pipeline.insight import frame, tasks
from rloo_pipeline.insight.charts import charts
from rloo_pipeline.insight.figures import figure
from rloo_pipeline.insight.summary import metrics_of
from rloo_pipeline.prompt_set import PromptSet
from rloo_pipeline.seeds import derive, permutation

CASES = 8
"""Held-out prompts whose completions are shown."""


class Answer(NamedTuple):
    """One completion as the page shows it."""

    text: str
    right: bool
    rewards: dict[str, float | None]
    finish_reason: str
    tokens: int


class Case(NamedTuple):
    """A held-out prompt and what the two policies made of it with the same seed."""

    messages: list[dict[str, str]]
    warmstart: Answer
    final: Answer


class Parts(NamedTuple):
    """What a gain in accuracy is made of, in shares of all completions; the three add up to the gain."""

    share: float
    """More (or fewer) completions have the property."""
    accuracy_with: float
    """Those that have it are right more often."""
    accuracy_without: float
    """Those that lack it are right more often."""


def render(config: Config, run: Path, summary: dict[str, Any]) -> str:
    """The page as HTML.

    Raises:
        UserError: a file of the run is missing or damaged.
    """
    rounds = [read_json(metrics_of(run, number)) for number in range(1, config.rounds + 1)]
    written = run / "config.yaml"
    return frame.fill(
        "page.html.j2",
        config=config,
        summary=summary,
        verdict=verdict(summary),
        reward_names=[*(reward.column for reward in config.rewards), "reward"],
        deciding=config.correct.reward or config.rewards[0].column,
        parts={
            name: parts_of_gain(summary["warmstart"], summary["final"], name) for name in summary["final"]["breakdown"]
        },
        checks=read_json(run / "warmstart" / "checks.json"),
        charts=[(chart, figure(chart, rounds)) for chart in charts(config.rewards)],
        cases=cases(config, run),
        tasks=tasks.of_run(config, run),
        yaml=written.read_text(encoding="utf-8") if written.exists() else None,
    )


def verdict(summary: JSON) -> str:
    """What the interval of the gain says, in a sentence for somebody who has not heard of a bootstrap."""
    low, high = summary["gain_ci95"]
    if low > 0:
        return "The interval lies above 0: other problems of this kind would very probably show a gain too."
    if high < 0:
        return "The interval lies below 0: the final policy is worse than the warm start, not just unlucky."
    return "The interval contains 0: this evaluation cannot tell the change from chance."


def parts_of_gain(before: JSON, after: JSON, name: str) -> Parts | None:
    """The gain taken apart by a property: each change weighted by the mean of before and after (Kitagawa 1955).

    None where a policy never or always has the property: one of its two accuracies does not exist then.
    """
    first, last = before["breakdown"][name], after["breakdown"][name]
    if any(value is None for value in [*first.values(), *last.values()]):
        return None
    change = {key: last[key] - first[key] for key in first}
    mean = {key: (last[key] + first[key]) / 2 for key in first}
    return Parts(
        change["share"] * (mean["accuracy_with"] - mean["accuracy_without"]),
        change["accuracy_with"] * mean["share"],
        change["accuracy_without"] * (1 - mean["share"]),
    )


def cases(config: Config, run: Path) -> list[Case]:
    """Some held-out prompts, drawn with the run's seed, and the first completion of each policy.

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
    before, after = (_answers(config, table, drawn) for table in found.values())
    return [Case(_messages(prompts[key]["prompt"]), *pair) for key, *pair in zip(ids, before, after, strict=True)]


def _answers(config: Config, table: pa.Table, places: list[int]) -> list[Answer]:
    """The first completions of some prompts."""
    samples = config.evaluation.num_generations
    right = seen.right(table, config.rewards, config.correct, samples)
    rows = table.take([place * samples for place in places]).to_pylist()
    names = [*(reward.column for reward in config.rewards), "reward"]
    return [
        Answer(
            row["completion"],
            bool(right[place, 0]),
            {n: row[n] for n in names},
            row["finish_reason"],
            len(row["completion_ids"]),
        )
        for place, row in zip(places, rows, strict=True)
    ]


def _messages(prompt: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
