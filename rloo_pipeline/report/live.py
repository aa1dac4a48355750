"""One frame of `rloo watch`: the state of a run on a terminal, drawn with rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rloo_pipeline.judging.diagnosis import Symptom, showing
from rloo_pipeline.judging.run_files import RunFiles
from rloo_pipeline.report.run_progress import SILENT, Progress, Sample, sample_of
from rloo_pipeline.report.terminal_table import clock

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
"""With title and values, a curve fits into 80 columns."""


def frame(run: RunFiles, progress: Progress) -> RenderableType:
    """The current state of a run, by its files, and how far it has come."""
    parts: list[RenderableType] = [_head(run, progress), "", _stages(progress), "", _curves(run)]
    parts += _diagnosis(showing(run.symptoms(since=len(run.rounds)), len(run.rounds)))
    if sample := sample_of(run):
        parts.append(_sample(sample))
    return Group(*parts)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The values as a line of bars; neighbours are averaged if there are more than `width` values. A gap is a space."""
    size = -(-len(values) // width) if width else 1
    cells = [[v for v in values[i : i + size] if v is not None] for i in range(0, len(values), size)]
    means = [sum(cell) / len(cell) if cell else None for cell in cells]
    present = [mean for mean in means if mean is not None]
    if not present:
        return ""
    low, span = min(present), max(present) - min(present)
    steps = len(BARS) - 1
    return "".join(" " if mean is None else BARS[round((mean - low) / span * steps) if span else 0] for mean in means)


def _head(run: RunFiles, progress: Progress) -> Text:
    done, rounds = len(run.rounds), run.config.rounds
    head = Text.assemble((run.config.run, "bold"), f"  round {done} of {rounds}")
    if run.ended_by_gate:
        head.append(f"  ended by a gate after round {done}", "red")
    elif progress.finished:
        head.append("  finished", "green")
    elif not progress.working:
        head.append("  no job is running, according to its files", "yellow")
    if progress.seconds_per_round and progress.seconds_left is not None:
        head.append(f"  {clock(progress.seconds_per_round)} per round, about {clock(progress.seconds_left)} left")
    return head


def _stages(progress: Progress) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for stage in progress.stages:
        counts = {"done": stage.done, "running": stage.working, "to come": stage.total - stage.done - stage.working}
        text = ", ".join(f"{count} {name}" for name, count in counts.items() if count > 0 or name == "done")
        table.add_row(stage.name, ProgressBar(max(stage.total, 1), stage.done, width=24), text)
    lines: list[RenderableType] = [table]
    for working in progress.working:
        style = "red" if working.failed else "yellow" if working.silent > SILENT else "dim"
        silent = f" (silent for {clock(working.silent)})" if working.silent > SILENT else ""
        name = working.job.log.removeprefix("logs/").removesuffix(".log")
        line = f"{name}: {working.last_line or 'starting'}{silent}"
        # of a failed job the whole reason counts, of another one a line
        lines.append(Text(line, style, no_wrap=not working.failed, overflow="fold" if working.failed else "ellipsis"))
    return Group(*lines)


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
    return table if table.row_count else Text("no round is done yet", "dim")


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
