"""A run while it works, on a terminal: its header, a line a round, its jobs."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table

from rloo_pipeline.checks.history import Metrics
from rloo_pipeline.config import Config
from rloo_pipeline.config.stages import jobs_of_round
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files
from rloo_pipeline.report import run_progress
from rloo_pipeline.report.jobs import STAGES_OF_ROUND, TOOK

COLUMNS = ("round", "reward", "held-out", "KL", "length", "tokens/s", "seconds")


class Row(NamedTuple):
    """One round; None for values that were not measured."""

    round: int
    reward: float | None
    held_out: float | None
    """Accuracy on held-out prompts, from 0 to 1."""
    kl: float | None
    """KL from the reference policy, nats per token."""
    length: float | None
    """Mean tokens of a completion."""
    tokens_per_second: float | None
    """Completion tokens of the round over its seconds."""
    seconds: float | None
    """Seconds from the start of the round's first job to the end of its last."""

    def cells(self) -> tuple[str, ...]:
        """The cells of a line."""
        formats = ("d", ".3f", ".1%", ".4f", ".0f", ".0f", ".1f")
        return tuple("" if value is None else f"{value:{form}}" for value, form in zip(self, formats, strict=True))


def header(config: Config, run: Path, log: str | None) -> list[tuple[str, str]]:
    """Names and values: the run, its model, data, rounds, the paths of the page and of Snakemake's log."""
    model, train = config.model, config.dataset.train
    rollout = config.rollout
    rounds = f"{config.rounds} of {rollout.generation_batch_size} completions, {rollout.num_generations} a prompt"
    lines = [
        ("run", config.run),
        ("model", model.name_or_path or model.build or ""),
        ("data", train.path or train.name or train.generator or ""),
        ("rounds", rounds),
        ("page", str(run / "report.html")),
    ]
    return [*lines, ("Snakemake's log", log)] if log else lines


class Measurements:
    """Measurements of a run so far; each finished job adds to them, so files are read only once."""

    def __init__(self, config: Config, folder: Path) -> None:
        """Reads the existing files.

        Args:
            config: the run's configuration.
            folder: its folder.
        """
        self.config, self.folder = config, folder
        self._metrics: list[Metrics] = []
        self._run = run_files.RunFiles(folder, config, self._metrics)
        self._seconds: list[float | None] = []
        self._held_out: dict[int, float] = {}
        """Accuracy by policy: of the rounds' own problems if `_by_round`, else of the evaluations."""
        self._by_round = False
        self.rows: list[Row] = []
        """A row for each finished round, and one for policy 0 where it was evaluated."""
        self._pace: float | None = None
        self._since = time.time()
        self.read(range(1, config.rounds + 1))

    @property
    def seconds_left(self) -> float | None:
        """Seconds for the remaining rounds, estimated from finished ones; None before the first is finished."""
        if not self._pace or not self.rounds_left:
            return None
        return run_progress.seconds_left(self._pace, self.rounds_left, time.time() - self._since)

    @property
    def rounds_left(self) -> int:
        """Number of rounds to come."""
        return self.config.rounds - len(self._metrics)

    def read(self, rounds: Sequence[int] = (), held_out: Collection[int] | None = None) -> None:
        """Reads these rounds, with those before them that are missing. If it reads a round, it drops the rows of later
        ones: those rounds are made again.

        Files that are being replaced change nothing.

        Args:
            rounds: numbers of rounds.
            held_out: rounds whose held-out accuracy is new. If None, or if a round is made again, all accuracies are
                read, which takes longer with each round.
        """
        before = len(self._metrics)
        first = min([before + 1, *rounds])
        try:
            for number in range(first, max(rounds, default=0) + 1):
                if not self._run.is_current(run_files.metrics_of(self.folder, number), number - 1):
                    break
                self._metrics[number - 1 :] = [run_files.read_metrics(self.folder, number)]
                self._seconds[number - 1 :] = [self._seconds_of(number)]
            if held_out is None or first <= before or (held_out and not self._by_round):
                self._held_out, self._by_round = self._run.accuracies(), bool(self._run.held_out())
            elif held_out:
                self._held_out |= {
                    measured["policy"]: measured["accuracy"] for measured in self._run.held_out(held_out)
                }
            self._pace = run_progress.seconds_per_round(self._run) or (self._seconds[-1] if self._seconds else None)
        except (UserError, OSError, ValueError, KeyError):
            return
        if len(self._metrics) != before:
            self._since = time.time()
        self.rows = self._rows()

    def _rows(self) -> list[Row]:
        held_out = self._held_out
        rows = [Row(0, None, held_out[0], None, None, None, None)] if 0 in held_out else []
        for number, (metrics, seconds) in enumerate(zip(self._metrics, self._seconds, strict=True), start=1):
            tokens = metrics.get("num_completion_tokens")
            speed = tokens / seconds if tokens is not None and seconds else None
            kl, length = metrics.get("kl"), metrics.get("completions/mean_length")
            rows.append(Row(number, metrics.get("reward"), held_out.get(number), kl, length, speed, seconds))
        return rows

    def _seconds_of(self, number: int) -> float | None:
        """Seconds from the begin of a round's first job to the end of its last one; None where no log says."""
        began, ended = list[datetime](), list[datetime]()
        logs = (self.folder / job.log for job in jobs_of_round(self.config, number))
        for log in (log for log in logs if log.parent.name in STAGES_OF_ROUND and log.exists()):
            for match in TOOK.finditer(log.read_text(encoding="utf-8", errors="replace")):
                ended.append(datetime.fromisoformat(match["ended"]))
                began.append(ended[-1] - timedelta(seconds=float(match["seconds"])))
        return max((max(ended) - min(began)).total_seconds(), 0.1) if ended else None


def table(shown: Sequence[Row], most: int) -> RenderableType:
    """A line a round, the latest `most` of them."""
    drawn = _empty_table()
    if len(shown) > most:
        drawn.add_row("…")
    for row in shown[-most:]:
        drawn.add_row(*row.cells())
    return drawn


def table_of_runs(runs: Sequence[Measurements]) -> RenderableType:
    """A line a run: its latest round."""
    drawn = _empty_table(Column("run", overflow="fold"))
    for run in runs:
        drawn.add_row(run.config.run, *run.rows[-1].cells())
    return drawn


def _empty_table(*before: Column) -> Table:
    columns = (Column(name, justify="right", no_wrap=True) for name in COLUMNS)
    return Table(*before, *columns, box=None, padding=(0, 2, 0, 0), header_style="dim")


def seconds_left_of(runs: Sequence[Measurements]) -> float | None:
    """Seconds until the last of these runs has done its rounds; None where one with rounds to come has done none."""
    seconds = [run.seconds_left for run in runs if run.rounds_left]
    known = [each for each in seconds if each is not None]
    return max(known, default=None) if len(known) == len(seconds) else None


def bar(done: int, total: int, seconds_left: float | None) -> RenderableType:
    """The jobs of this call, and the time that the rounds to come will take."""
    line = Table.grid(padding=(0, 2))
    text = f"{done} of {total} jobs"
    if seconds_left is not None:
        text += f", about {clock(seconds_left)} until the last round is done"
    line.add_row(ProgressBar(max(total, 1), done, width=24), text)
    return line


def sentence(row: Row, rounds: int, seconds_left: float | None) -> str:
    """A round in one plain line."""
    cells = zip(COLUMNS[1:], row.cells()[1:], strict=True)
    values = ", ".join(f"{name} {cell}" for name, cell in cells if cell)
    rest = f"; about {clock(seconds_left)} until the last round is done" if seconds_left is not None else ""
    return f"round {row.round} of {rounds}: {values}{rest}"


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    return str(timedelta(seconds=round(seconds)))
