"""One frame of `rloo watch A B C`: curves of several runs, or of the arms of an experiment, in one chart each."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import yaml
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rloo_pipeline.config.run_set import EXPERIMENT
from rloo_pipeline.judging import run_files
from rloo_pipeline.judging.run_files import RunFiles

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
HEIGHT = 8
LABELS = 9
"""Columns for the numbers beside a chart."""
Values = Mapping[int, float]


class CurvesOfRun(NamedTuple):
    """A run, or the mean over the seeds of an arm."""

    name: str
    done: int
    """Rounds that are done, of all seeds."""
    planned: int
    reward: Values
    """Mean reward by round."""
    held_out: Values
    """Held-out accuracy by the round of the policy."""
    is_finished: bool


def read(folders: Iterable[Path]) -> list[CurvesOfRun]:
    """Curves of runs, and of each arm of experiments.

    Raises:
        UserError: a folder has neither, or a file is damaged.
    """
    curves = []
    for folder in folders:
        if not (folder / EXPERIMENT).exists():
            curves.append(_mean(folder.name, [run_files.read(folder)]))
            continue
        about = yaml.safe_load((folder / EXPERIMENT).read_text(encoding="utf-8"))
        for arm in about["arms"]:
            seeds = [folder / arm / str(seed) for seed in about["seeds"]]
            curves.append(_mean(arm, [run_files.read(seed) for seed in seeds if (seed / "config.yaml").exists()]))
    return curves


def _mean(name: str, runs: Sequence[RunFiles]) -> CurvesOfRun:
    """The mean of runs at each round that all of them have."""
    rewards = [
        {number: value for number, metrics in enumerate(run.rounds, 1) if (value := metrics.get("reward")) is not None}
        for run in runs
    ]
    finished = bool(runs) and all(run_files.is_finished(run.folder, run.config) for run in runs)
    planned = sum(run.config.rounds for run in runs)
    done = sum(len(run.rounds) for run in runs)
    return CurvesOfRun(name, done, planned, _over(rewards), _over([run.accuracies() for run in runs]), finished)


def _over(curves: Sequence[Values]) -> Values:
    """The mean at each round that all curves have."""
    rounds = set(curves[0]).intersection(*curves[1:]) if curves else set[int]()
    return {number: fmean(curve[number] for curve in curves) for number in sorted(rounds)}


def frame(runs: Sequence[CurvesOfRun], width: int) -> RenderableType:
    """The runs with their latest values, and a chart of each measure.

    Args:
        runs: at most as many as there are letters.
        width: columns of the terminal.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("run", overflow="fold")
    for name in ("rounds", "reward", "held-out"):
        table.add_column(name, justify="right", no_wrap=True)
    for mark, run in zip(_marks(len(runs)), runs, strict=True):
        rounds = f"{run.done} of {run.planned}" if run.planned else "not begun"
        table.add_row(mark, run.name, rounds, _last(run.reward, ".3f"), _last(run.held_out, ".1%"))
    parts: list[RenderableType] = [table]
    measures = (("reward", [run.reward for run in runs], ".3g"), ("held-out", [run.held_out for run in runs], ".1%"))
    for title, curves, form in measures:
        if any(curves):
            parts += ["", chart(title, curves, form, width)]
    if len(parts) == 1:
        parts.append(Text("no round is done yet", "dim"))
    return Group(*parts)


def _last(values: Values, form: str) -> str:
    return f"{values[max(values)]:{form}}" if values else ""


def _marks(count: int) -> list[Text]:
    """A letter and a colour for each run."""
    return [Text(letter, COLOURS[i % len(COLOURS)]) for i, letter in enumerate(string.ascii_uppercase[:count])]


def chart(title: str, curves: Sequence[Values], form: str, width: int) -> Text:
    """Curves on common axes, each as its letter; where curves meet, the letter of the later run.

    Args:
        title: the measure.
        curves: by round.
        form: format of the numbers beside the axis.
        width: columns.
    """
    points = [(number, value) for curve in curves for number, value in curve.items()]
    first, last = min(number for number, _ in points), max(number for number, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    columns = min(width - LABELS - 1, max(2 * (last - first) + 1, 20))
    cells = [[Text(" ")] * columns for _ in range(HEIGHT)]
    for mark, curve in zip(_marks(len(curves)), curves, strict=True):
        for number, value in curve.items():
            column = round((number - first) / max(last - first, 1) * (columns - 1))
            row = round((high - value) / ((high - low) or 1) * (HEIGHT - 1))
            cells[row][column] = mark
    labels = {0: f"{high:{form}}", HEIGHT - 1: f"{low:{form}}" if high > low else ""}
    lines = [Text(title, "bold")]
    for row, line in enumerate(cells):
        lines.append(Text.assemble((f"{labels.get(row, ''):>{LABELS - 1}} ", "dim"), ("│", "dim"), *line))
    rounds = f"{first}{f'round {last}':>{columns - len(str(first))}}"
    return Text("\n").join([*lines, Text(" " * (LABELS + 1) + rounds, "dim")])
