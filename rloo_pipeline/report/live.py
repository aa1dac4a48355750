"""Draws the live view of runs on a terminal with rich, for `rloo watch` and for Snakemake while it works.

Both show the progress of the runs, their latest rounds, running jobs and progress bars. `rloo watch` adds curves,
symptoms and a completion. Curves of several runs, or of an experiment's arms, share one chart per measure.
"""

import string
from collections.abc import Iterable, Sequence
from itertools import cycle
from statistics import mean

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.judging.diagnosis import Symptom, showing
from rloo_pipeline.judging.run_files import RunFiles
from rloo_pipeline.report.live_run import COLUMNS, CurvesOfRun, LiveRun, Row, Values, clock, outcome, seconds_left_of
from rloo_pipeline.report.run_progress import SILENT, Progress, Sample, Stage, Working, sample_of

BARS = "▁▂▃▄▅▆▇█"
CURVES = (
    ("reward", "reward"),
    ("KL per token", "kl"),
    ("entropy", "entropy"),
    ("length", "completions/mean_length"),
    ("truncated", "completions/clipped_ratio"),
    ("groups without signal", "frac_reward_zero_std"),
    ("gradient norm", "grad_norm"),
)
COLOURS = {"warn": "yellow", "stop": "red"}
SAMPLE_LINES = 6
CURVE_WIDTH = 32
"""Width of a curve in characters, chosen so that it fits into 80 columns with its title and values."""
COLOURS_OF_RUNS = ("cyan", "magenta", "green", "yellow", "blue", "red")
HEIGHT = 8
LABELS = 9
"""Width of the axis labels of a chart, in columns."""
MOST_RUNS = 2
"""Number of runs up to which every round is shown. With more, as in an experiment, only the latest round of each is
shown.
"""
ROUNDS = 4
"""Number of rounds that `rloo watch` lists."""


def frame(
    runs: Sequence[LiveRun],
    stages: Sequence[Stage],
    jobs: Iterable[RenderableType],
    most: int,
    state: Text | None = None,
    details: Sequence[RenderableType] = (),
) -> RenderableType:
    """Draws the current state of runs.

    Args:
        runs: the runs.
        stages: job counts of stages; each stage gets a bar.
        jobs: a line for each running job.
        most: maximum number of lines for rounds, or for runs if there are more than MOST_RUNS.
        state: additional line about the run.
        details: parts shown between jobs and bars.
    """
    parts: list[RenderableType] = []
    if len(runs) <= MOST_RUNS:
        for run in runs:
            parts += [_head(run, state), _table([((), row) for row in run.rows(most + 1)], most)]
    else:
        lines = [((run.run.config.run,), latest[-1]) for run in runs if (latest := run.rows(1))]
        parts.append(_table(lines, most, Column("run")))
        if seconds_left := seconds_left_of(runs):
            parts.append(f"about {clock(seconds_left)} until the last round is done")
    return Group(*parts, *jobs, *details, _bars(stages))


def watched(run: RunFiles, progress: Progress, ended: bool = False) -> RenderableType:
    """Draws the state of a run, using only its files.

    Args:
        run: the run's files.
        progress: the run's jobs.
        ended: True if nothing works on the run any more.
    """
    state = Text()
    if run.ended_by_gate:
        state = Text(f"  ended by a gate after round {len(run.rounds)}", "red")
    elif progress.finished:
        state = Text("  finished", "green")
    elif ended:
        state = Text(f"  has ended; the command that started it continues it{_if_copied(run)}", "red")
    elif not progress.working:
        state = Text(f"  between two jobs, or not running{_if_copied(run)}", "yellow")
    gain = [outcome(read_artifact(run.folder / "summary.json"))] if progress.finished else []
    details = [*gain, "", _curves(run), *_diagnosis(showing(run.symptoms(since=len(run.rounds)), len(run.rounds))), ""]
    view = frame([LiveRun(run)], progress.stages, map(_working, progress.working), ROUNDS, state, details)
    sample = sample_of(run)
    return Group(view, _sample(sample)) if sample else view


def _if_copied(run: RunFiles) -> str:
    """Advice for a run whose files are complete and older than what they were made from."""
    known = len(list(run.folder.glob("rounds/*/metrics.json")))
    complete = (run.folder / "summary.json").exists() and known == run.config.rounds
    return "; if it was copied without times, `rloo adopt` accepts it" if complete else ""


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draws values as a line of bars. If there are more than `width` values, neighbours are averaged. A gap is a
    space.
    """
    size = -(-len(values) // width) if width else 1
    cells = [[v for v in values[i : i + size] if v is not None] for i in range(0, len(values), size)]
    means = [mean(cell) if cell else None for cell in cells]  # exact: rounding would make bars of equal values differ
    present = [each for each in means if each is not None]
    if not present:
        return ""
    low, span = min(present), max(present) - min(present)
    steps = len(BARS) - 1
    return "".join(" " if each is None else BARS[round((each - low) / span * steps) if span else 0] for each in means)


def _head(live: LiveRun, state: Text | None) -> Text:
    run = live.run
    head = Text.assemble((run.config.run, "bold"), f"  round {len(run.rounds)} of {run.config.rounds}", state or "")
    if live.pace and (seconds_left := live.seconds_left()) is not None:
        head.append(f"  {clock(live.pace)} per round, about {clock(seconds_left)} left")
    return head


def _table(lines: Sequence[tuple[Sequence[RenderableType], Row]], most: int, *before: Column) -> RenderableType:
    """A table with a line for each of the latest `most` rounds or runs. Columns without values are left out.

    Args:
        lines: for each line, the cells of the columns in `before`, and the round.
        most: maximum number of lines.
        before: columns to put before those of a round.
    """
    cells = [row.cells() for _, row in lines]
    shown = [place for place in range(len(COLUMNS)) if any(values[place] for values in cells)]
    columns = (Column(COLUMNS[place], justify="right", no_wrap=True) for place in shown)
    table = Table(*before, *columns, box=None, padding=(0, 2, 0, 0), header_style="dim")
    if len(lines) > most:
        table.add_row("…")
    for (first, _), values in list(zip(lines, cells, strict=True))[-most:]:
        table.add_row(*first, *(values[place] for place in shown))
    return table if lines else Text("no round is done yet", "dim")


def _bars(stages: Sequence[Stage]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for stage in stages:
        counts = {"done": stage.done, "running": stage.working, "to come": stage.total - stage.done - stage.working}
        text = ", ".join(f"{count} {name}" for name, count in counts.items() if count > 0 or name == "done")
        table.add_row(stage.name, ProgressBar(max(stage.total, 1), stage.done, width=24), text)
    return table


def _working(working: Working) -> Text:
    style = "red" if working.failed else "yellow" if working.silent > SILENT else "dim"
    silent = f" (silent for {clock(working.silent)})" if working.silent > SILENT else ""
    name = working.job.log.removeprefix("logs/").removesuffix(".log")
    line = f"{name}: {working.last_line or 'starting'}{silent}"
    # failed jobs show the whole reason, others a single line
    return Text(line, style, no_wrap=not working.failed, overflow="fold" if working.failed else "ellipsis")


def _curves(run: RunFiles) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    accuracies = run.accuracies()
    if accuracies:
        line = [accuracies.get(number) for number in range(max(accuracies) + 1)]
        first, last = accuracies[min(accuracies)], accuracies[max(accuracies)]
        table.add_row("held-out accuracy", Text(sparkline(line, CURVE_WIDTH), "green"), f"{first:.1%} → {last:.1%}")
    for title, metric in CURVES:
        values = [metrics.get(metric) for metrics in run.rounds]
        present = [value for value in values if value is not None]
        if present:
            table.add_row(title, Text(sparkline(values, CURVE_WIDTH), "cyan"), f"{present[0]:.3g} → {present[-1]:.3g}")
    return table


def _diagnosis(symptoms: list[Symptom]) -> list[RenderableType]:
    return [
        Text.assemble((f"{symptom.title}: ", COLOURS[symptom.action]), f"{symptom.evidence}; try: {symptom.cure}")
        for symptom in symptoms
    ]


def _sample(sample: Sample) -> RenderableType:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3g}"
    lines = sample.completion.strip().splitlines() or [""]
    shown = "\n".join([*lines[:SAMPLE_LINES], *(["…"] if len(lines) > SAMPLE_LINES else [])])
    prompt = Text(" ".join(sample.prompt.split())[-200:], "dim")
    return Panel(Group(prompt, Text(shown[:1200])), title=f"a completion of round {sample.round}, {reward}")


def frame_of_runs(runs: Sequence[CurvesOfRun], width: int) -> RenderableType:
    """Draws several runs: their latest values, and a chart for each measure.

    Args:
        runs: runs to draw, at most as many as there are letters.
        width: width of the terminal in columns.
    """
    marks = _marks(len(runs))
    before = [Column(""), Column("run", overflow="fold"), Column("rounds", justify="right", no_wrap=True)]
    finals = ["" if run.final is None else f"{run.final:.1%}" for run in runs]
    if any(finals):
        before.append(Column("final pass@1", justify="right", no_wrap=True))
    cells = [
        (mark, run.name, run.rounds, final)[: len(before)] for mark, run, final in zip(marks, runs, finals, strict=True)
    ]
    lines = [(each, run.latest) for each, run in zip(cells, runs, strict=True)]
    parts: list[RenderableType] = [_table(lines, len(lines), *before)]
    measures = (
        ("reward", [run.reward for run in runs], ".3g"),
        ("held-out accuracy, each run on its own problems", [run.held_out for run in runs], ".1%"),
    )
    for title, curves, form in measures:
        if any(curves):
            parts += ["", chart(title, curves, form, width)]
    return Group(*parts) if len(parts) > 1 else Group(*parts, Text("no round is done yet", "dim"))


def _marks(count: int) -> list[Text]:
    """A letter and a colour for each run."""
    return [Text(*mark) for mark in zip(string.ascii_uppercase[:count], cycle(COLOURS_OF_RUNS), strict=False)]


def chart(title: str, curves: Sequence[Values], form: str, width: int) -> Text:
    """Draws curves on common axes, each with its letter. Where curves overlap, the later run's letter is shown.

    Args:
        title: name of the measure.
        curves: values by round, for each run.
        form: format of the axis labels.
        width: width in columns.
    """
    points = [(number, value) for curve in curves for number, value in curve.items()]
    first, last = min(number for number, _ in points), max(number for number, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    columns = max(1, min(width - LABELS - 1, max(2 * (last - first) + 1, 20)))
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
    rounds = f"{first}{f'round {last}'.rjust(columns - len(str(first)))}"
    return Text("\n").join([*lines, Text(" " * (LABELS + 1) + rounds, "dim")])
