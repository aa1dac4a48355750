"""reward-test: a reward function on real rows before a run pays for it: values, time, exceptions row by row.

The function is called as a run calls it, in worker processes with deadlines, and its output passes the same checks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from rloo_pipeline.config import Reward, Source
from rloo_pipeline.data.rows import Row, read_rows
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.scoring.completion_text import text_of
from rloo_pipeline.scoring.reward_call import OWN_ARGUMENTS
from rloo_pipeline.scoring.score_batch import FunctionScores, RewardBatch, score_all

SHOWN = 5
"""Rows of each kind that are shown."""
BINS = 10
"""Bars of the histogram; as many different values are shown one by one."""


class Verdicts(NamedTuple):
    """What somebody else says of the completions, and when the function says the same."""

    column: str
    """Its values are true and false, or 1 and 0."""
    threshold: float
    """A score of at least this calls a completion right; None and less call it wrong."""


def reward_test(
    reward: Reward,
    data: Path,
    completions: Path | None,
    workers: int,
    tokenizer: str | None = None,
    verdicts: Verdicts | None = None,
) -> None:
    """Scores the rows and prints what came of it.

    Args:
        reward: the function.
        data: rows with the dataset's columns.
        completions: rows with what a model said; the data's own solutions where not given.
        workers: processes.
        tokenizer: folder or Hub id of the policy: makes token ids where the completions come without, and is given to
            functions that name `tokenizer_path`.
        verdicts: shows how often the function agrees with them.

    Raises:
        UserError: a file does not fit, the output is bad, or some rows raised.
    """
    rows = _read(data)
    made = _read(completions) if completions else _own_completions(data, rows)
    if len(made) % len(rows):
        raise UserError(
            f"{completions}: {len(made)} completions for the {len(rows)} rows of {data}; give each row equally many, "
            "those of a row beside each other"
        )
    samples = len(made) // len(rows)
    batch = batch_of([row for row in rows for _ in range(samples)], made, completions or data)
    labels = _labels(verdicts, made, completions or data) if verdicts else []
    if tokenizer is not None and batch.completion_ids is None:
        batch = batch._replace(completion_ids=_tokenized(batch.completions, tokenizer))
    began = time.monotonic()
    facts = {} if tokenizer is None else {"tokenizer_path": tokenizer}
    (scored,) = score_all([reward], batch, [samples] * len(rows), workers, facts)
    seconds = time.monotonic() - began
    show(reward, batch, scored, samples, seconds, workers)
    if verdicts:
        show_agreement(verdicts, labels, batch, scored)
    failed = [row for row, error in enumerate(scored.errors) if error]
    if failed:
        raise UserError(
            f"{len(failed)} of {len(made)} rows failed, row {failed[0]} first: {scored.errors[failed[0]]}; mend the "
            "function, since a run stops at an exception (on_error: none lets it go on)"
        )


def batch_of(rows: Sequence[Row], made: Sequence[Row], origin: Path) -> RewardBatch:
    """What the function sees: TRL's arguments and every column of the data."""
    if missing := [place for place, row in enumerate(made) if "completion" not in row]:
        near = did_you_mean("completion", made[missing[0]])
        raise UserError(f"{origin}: row {missing[0]} has no column 'completion'{near}")
    prompts = [row.get("prompt") or [{"role": "user", "content": str(row.get("question", ""))}] for row in rows]
    texts = [text_of(row["completion"]) for row in made]
    completions: list[Any] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    own = {*OWN_ARGUMENTS, "prompt", "prompt_ids", "completion", "completion_ids"}
    names = [name for name in rows[0] if name not in own]
    columns = {name: [row.get(name) for row in rows] for name in names}
    columns.setdefault("finish_reason", [row.get("finish_reason", "stop") for row in made])
    with_ids = all(row.get("completion_ids") is not None for row in made)
    return RewardBatch(prompts, completions, [row["completion_ids"] for row in made] if with_ids else None, columns)


def _tokenized(completions: Sequence[Any], tokenizer: str) -> list[list[int]]:
    """Token ids of texts. In a run they are those that were sampled, which may be others for the same text."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        what = " ".join(str(error).split())[:200]
        raise UserError(f"--tokenizer {tokenizer}: no tokenizer there ({what}); give the folder of a policy") from error
    ids: list[list[int]] = found([text_of(completion) for completion in completions], add_special_tokens=False)[
        "input_ids"
    ]
    return ids


def _read(path: Path) -> list[Row]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a .jsonl, .json or .parquet file")
    return read_rows(Source(path=str(path)), str(path))


def _own_completions(data: Path, rows: Sequence[Row]) -> list[Row]:
    """The data's own solutions as completions: the column `completion`, or else `answer`."""
    name = next((name for name in ("completion", "answer") if name in rows[0]), None)
    if name is None:
        raise UserError(f"{data}: has no column 'completion' or 'answer' to score; give a file with --completions")
    return [{**row, "completion": row[name]} for row in rows]


def _labels(verdicts: Verdicts, made: Sequence[Row], origin: Path) -> list[bool]:
    """The column with the verdicts."""
    labels = []
    for place, row in enumerate(made):
        if verdicts.column not in row:
            near = did_you_mean(verdicts.column, row)
            raise UserError(f"{origin}: row {place} has no column '{verdicts.column}'{near}")
        if row[verdicts.column] not in (0, 1):
            value = row[verdicts.column]
            raise UserError(f"{origin}: row {place} has {value!r} in '{verdicts.column}'; labels are true and false")
        labels.append(bool(row[verdicts.column]))
    return labels


def show_agreement(verdicts: Verdicts, labels: Sequence[bool], batch: RewardBatch, scored: FunctionScores) -> None:
    """How often score and label say the same, with Wilson's interval (1927), and where they do not."""
    from scipy.stats import binomtest

    console = _console()
    said = [score is not None and score >= verdicts.threshold for score in scored.scores]
    count = len(labels)
    agree = binomtest(sum(map(bool.__eq__, labels, said)), count)
    low, high = agree.proportion_ci(method="wilson")
    # no title of the table: it would be broken at the table's width
    console.print(f"agreement {agree.statistic:.2%} of {count} rows (95% {low:.2%} to {high:.2%})", style="italic")
    table = Table(f"labels: {verdicts.column}", f"score ≥ {verdicts.threshold:g}", "less, or None")
    for label in (True, False):
        both = [score for score, other in zip(said, labels, strict=True) if other is label]
        table.add_row("right" if label else "wrong", str(sum(both)), str(len(both) - sum(both)))
    console.print(table)
    apart = [row for row in range(count) if labels[row] != said[row]]
    if apart:
        title = f"rows on which they differ, {min(SHOWN, len(apart))} of {len(apart)}"
        console.print(_rows(title, apart[:SHOWN], batch, scored))


def _console() -> Console:
    """Standard output; wide enough where it is a file."""
    return Console(highlight=False, width=None if Console().is_terminal else 120)


def show(
    reward: Reward, batch: RewardBatch, scored: FunctionScores, samples: int, seconds: float, workers: int
) -> None:
    """The findings as tables on standard output."""
    console = _console()
    count = len(scored.scores)
    known = np.array([value + 0.0 for value in scored.scores if value is not None])  # no -0
    facts = Table(title=f"{reward.function} on {count} rows", title_justify="left", show_header=False)
    working = sum(scored.seconds)
    each = f"{1000 * working / count:.3g} ms a row in the function"
    facts.add_row("time", f"{seconds:.2f} s with {workers} worker(s), {count / seconds:,.0f} rows/s; {each}")
    failed = sum(error is not None for error in scored.errors)
    facts.add_row("None", f"{1 - len(known) / count:.1%} ({count - len(known)} rows)")
    facts.add_row("failed", f"{failed} rows")
    noted = [row for row, note in enumerate(scored.notes) if note]
    if noted:
        facts.add_row("not scored, says the function", f"{len(noted)} rows, row {noted[0]}: {scored.notes[noted[0]]}")
    if len(known):
        facts.add_row("mean, standard deviation", f"{known.mean():.4g}, {known.std():.4g}")
        facts.add_row("least, greatest", f"{known.min():.4g}, {known.max():.4g}")
    if samples > 1:
        groups = [scored.scores[first : first + samples] for first in range(0, count, samples)]
        differ = sum(len({value for value in group if value is not None}) > 1 for group in groups)
        facts.add_row("groups that teach", f"{differ / len(groups):.1%} of {len(groups)}, with {samples} each")
    console.print(facts)
    if len(known):
        console.print(histogram(known))
    slow = sorted(range(count), key=lambda row: -scored.seconds[row])[:SHOWN]
    console.print(_rows("slowest rows", slow, batch, scored))
    wrong = [row for row, error in enumerate(scored.errors) if error]
    if wrong:
        console.print(_rows(f"failed rows, {min(SHOWN, len(wrong))} of {len(wrong)}", wrong[:SHOWN], batch, scored))


def histogram(values: np.ndarray[Any, Any]) -> Table:
    """How many rows got which value: each value where they are few, else ten bins."""
    table = Table("value", "rows", "", title="values", title_justify="left")
    found, counts = np.unique(values, return_counts=True)
    names = [f"{value:.6g}" for value in found]
    if len(found) > BINS:
        counts, edges = np.histogram(values, bins=BINS)
        names = [f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges)]
    for name, count in zip(names, counts, strict=True):
        table.add_row(name, str(count), "█" * round(40 * count / max(counts)))
    return table


def _rows(title: str, rows: Sequence[int], batch: RewardBatch, scored: FunctionScores) -> Table:
    from rich.markup import escape

    table = Table("row", "seconds", "score", "error", "completion", title=title, title_justify="left")
    for row in rows:
        score, text = scored.scores[row], " ".join(text_of(batch.completions[row]).split())
        value = "None" if score is None else f"{score + 0.0:.4g}"
        shown = escape(text if len(text) <= 60 else f"{text[:57]}…")
        table.add_row(str(row), f"{scored.seconds[row]:.4f}", value, escape(scored.errors[row] or ""), shown)
    return table
