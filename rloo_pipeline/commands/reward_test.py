"""reward-test: tries a reward function on rows of data before a run, and prints scores, times and exceptions.

The function is called as in a run: in worker processes with time limits, with the same checks of its output.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from rloo_pipeline.artifacts.prompt_set import content_text
from rloo_pipeline.before_run import reward_audit
from rloo_pipeline.config import Reward, Source
from rloo_pipeline.data.rows import Row, read_rows
from rloo_pipeline.errors import UserError, counted, did_you_mean, one_line
from rloo_pipeline.runtime.console import Terminal
from rloo_pipeline.transformers_internals import tokenizer_file
from rloo_pipeline.user_code.completion_text import as_completion, text_of
from rloo_pipeline.user_code.dispatch import WorkerPools
from rloo_pipeline.user_code.score_batch import FunctionScores, RewardBatch, log_summary
from rloo_pipeline.user_code.score_table import OF_PROMPTS

EXAMPLES = 5
"""Number of rows of each kind that are printed."""
BINS = 10
"""Number of bars in the histogram. Up to this many distinct values are printed one by one."""


def reward_test(reward: Reward, data: Path, completions: Path | None, workers: int, tokenizer: str | None) -> None:
    """Scores the rows and prints the results.

    Args:
        reward: the function.
        data: file with rows of the dataset.
        completions: file with a model's completions; None to score the data's own solutions.
        workers: number of processes.
        tokenizer: folder or Hub id of the policy. It makes token ids for completions without any, and is passed to
            functions with an argument `tokenizer_path`.

    Raises:
        UserError: the files do not fit together, the function's output is invalid, or it failed on some rows.
    """
    rows = _read(data)
    file = completions or data
    scored_rows = _read(completions) if completions else _own_completions(data, rows)
    samples, remainder = divmod(len(scored_rows), len(rows))
    if remainder:
        raise UserError(
            f"{file}: {len(scored_rows)} completions for the {len(rows)} rows of {data}; each row needs equally "
            "many completions, one after the other"
        )
    batch = _batch([row for row in rows for _ in range(samples)], scored_rows, file)
    if tokenizer is not None and batch.completion_ids is None:
        batch = batch._replace(completion_ids=_tokenize(batch.completions, tokenizer))
    started = time.monotonic()
    constants = {} if tokenizer is None else {"tokenizer_path": tokenizer}
    with WorkerPools([reward], workers) as pools:
        (scored,) = pools.score(batch, [samples] * len(rows), constants, more=True)
        seconds = time.monotonic() - started
        if samples == 1:  # a run's calls have several completions
            (both,) = pools.score(_first_row_twice(batch), [2], constants)
            scored.errors[0] = scored.errors[0] or next(filter(None, both.errors), None)
    log_summary(reward, scored)
    console = Terminal(width=None if Terminal().is_terminal else 120)
    console.print(_summary(reward, scored, samples, seconds, workers))
    failed = [row for row, error in enumerate(scored.errors) if error]
    if len(scores := _finite(scored)):
        console.print(_histogram(scores))
    by_time = sorted(range(len(scored.scores)), key=lambda row: -scored.seconds[row])
    _print_rows(console, "slowest rows", by_time, batch, scored)
    _print_rows(console, "failed rows", failed, batch, scored)
    _print_golds(console, reward, rows)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(scored_rows)} rows failed, row {failed[0]} first: {scored.errors[failed[0]]}; fix "
            "the function (on_error and on_timeout of a reward say what a run does with such rows)"
        )


def _first_row_twice(batch: RewardBatch) -> RewardBatch:
    ids = batch.completion_ids and batch.completion_ids[:1] * 2
    columns = {name: values[:1] * 2 for name, values in batch.columns.items()}
    return RewardBatch(batch.prompts[:1] * 2, batch.completions[:1] * 2, ids, columns)


def _batch(rows: Sequence[Row], scored_rows: Sequence[Row], file: Path) -> RewardBatch:
    """The function's arguments: TRL's, and every column of the data."""
    for number, row in enumerate(scored_rows):
        if "completion" not in row:
            suggestion = did_you_mean("completion", row)
            raise UserError(f"{file}: row {number} has no column 'completion'{suggestion}")
    prompts = [row.get("prompt") or [{"role": "user", "content": str(row.get("question", ""))}] for row in rows]
    completions = [
        _completion(row["completion"], prompt, f"{file}: row {number}")
        for number, (row, prompt) in enumerate(zip(scored_rows, prompts, strict=True))
    ]
    reserved = {*OF_PROMPTS, "completion"}
    columns = {name: [row.get(name) for row in rows] for name in rows[0] if name not in reserved}
    columns.setdefault("finish_reason", [row.get("finish_reason", "stop") for row in scored_rows])
    have_ids = all(row.get("completion_ids") is not None for row in scored_rows)
    ids = [row["completion_ids"] for row in scored_rows] if have_ids else None
    return RewardBatch(prompts, completions, ids, columns)


def _completion(value: Any, prompt: Any, location: str) -> Any:
    """A completion in the form that it has in a run: the messages of an episode, or a string."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        content = value[-1].get("content")
        if content is not None and len(value) > 1 and not isinstance(prompt, str):
            return value
        value = None if content is None else content_text(content)
    if value is None:
        raise UserError(f"{location} has null where the completion should be; write one, or drop the row")
    return as_completion(str(value), prompt)


def _tokenize(completions: Sequence[Any], folder: str) -> list[list[int]]:
    """Tokenizes the texts. A run uses the sampled ids, which can differ for the same text."""
    tokenizer_file.prepare_tokenizers()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = one_line(error)
        raise UserError(f"--tokenizer {folder}: no tokenizer there ({reason}); pass the folder of a policy") from error
    encoded = tokenizer([text_of(completion) for completion in completions], add_special_tokens=False)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def _read(path: Path) -> list[Row]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; pass a .jsonl, .json, .csv, .tsv or .parquet file")
    return read_rows(Source(path=str(path)), str(path))


def _own_completions(data: Path, rows: Sequence[Row]) -> list[Row]:
    """The data's own solutions as completions, from the column `completion` or else `answer`."""
    name = next((name for name in ("completion", "answer") if name in rows[0]), None)
    if name is None:
        raise UserError(f"{data}: has no column 'completion' or 'answer' to score; pass a file with --completions")
    return [{**row, "completion": row[name]} for row in rows]


def _summary(reward: Reward, scored: FunctionScores, samples: int, seconds: float, workers: int) -> Table:
    count = len(scored.scores)
    scores = _finite(scored)
    table = Table(title=f"{reward.function} on {counted(count, 'row')}", title_justify="left", show_header=False)
    per_row = f"{1000 * sum(scored.seconds) / count:.3g} ms per row in the function"
    table.add_row("time", f"{seconds:.2f} s with {workers} worker(s), {count / seconds:,.0f} rows/s; {per_row}")
    table.add_row("None", f"{1 - len(scores) / count:.1%} ({counted(count - len(scores), 'row')})")
    table.add_row("failed", counted(sum(error is not None for error in scored.errors), "row"))
    if rows_with_note := [row for row, note in enumerate(scored.notes) if note]:
        table.add_row(
            "not scored, with a reason",
            f"{counted(len(rows_with_note), 'row')}, row {rows_with_note[0]}: {scored.notes[rows_with_note[0]]}",
        )
    if len(scores):
        table.add_row("mean, standard deviation", f"{scores.mean():.4g}, {scores.std():.4g}")
        table.add_row("minimum, maximum", f"{scores.min():.4g}, {scores.max():.4g}")
    if samples > 1:
        groups = [scored.scores[first : first + samples] for first in range(0, count, samples)]
        share = sum(len({score for score in group if score is not None}) > 1 for group in groups) / len(groups)
        table.add_row("groups with different scores", f"{share:.1%} of {len(groups)}, with {samples} each")
    return table


def _finite(scored: FunctionScores) -> np.ndarray[Any, Any]:
    """The scores that are not None, [rows]. Adding 0 turns -0 into 0."""
    return np.array([score + 0.0 for score in scored.scores if score is not None])


def _histogram(scores: np.ndarray[Any, Any]) -> Table:
    table = Table("value", "rows", "", title="values", title_justify="left")
    values, counts = np.unique(scores, return_counts=True)
    names = [f"{value:.6g}" for value in values]
    if len(values) > BINS:
        counts, edges = np.histogram(scores, bins=BINS)
        names = [f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges)]
    for name, count in zip(names, counts, strict=True):
        table.add_row(name, str(count), "█" * round(40 * count / max(counts)))
    return table


def _print_golds(console: Terminal, reward: Reward, rows: Sequence[Row]) -> None:
    """Prints each gold answer that the reward cannot use."""
    result = reward_audit.audit(reward, rows)
    if result is None:
        return
    lines = [
        *((row, "cannot be read") for row in result.unreadable),
        *((row, "does not accept itself") for row in result.not_themselves),
        *((row, f"accepts the gold answer of {result.of_row(other)}") for row, other in result.accepting),
    ]
    if lines:
        title = f"gold answers in '{result.column}', {len(result.golds):,} read and {result.pairs:,} compared in pairs"
        table = Table("row", "gold answer", "problem", title=title, title_justify="left")
        for row, problem in lines:
            table.add_row(str(row), one_line(repr(result.golds[row]), 60), problem)
        console.print(table)


def _print_rows(console: Terminal, title: str, rows: Sequence[int], batch: RewardBatch, scored: FunctionScores) -> None:
    """Prints a table of the first rows; nothing if there are none."""
    if not rows:
        return
    counts = f"{title}, {min(EXAMPLES, len(rows))} of {len(rows)}"
    table = Table("row", "seconds", "score", "error", "completion", title=counts, title_justify="left")
    for row in rows[:EXAMPLES]:
        score, text = scored.scores[row], " ".join(text_of(batch.completions[row]).split())
        value = "None" if score is None else f"{score + 0.0:.4g}"
        excerpt = text if len(text) <= 60 else f"{text[:57]}…"
        table.add_row(str(row), f"{scored.seconds[row]:.4f}", value, scored.errors[row] or "", excerpt)
    console.print(table)
