"""Renders comparison.html, one self-contained page that shows finished runs side by side."""

import math
from collections.abc import Sequence

from rloo_pipeline.config import JSON
from rloo_pipeline.report import frame
from rloo_pipeline.report.charts import shared_charts
from rloo_pipeline.report.figures import figure_of_runs, marks
from rloo_pipeline.report.finished import FinishedRun

ALPHA = 0.05
"""Largest corrected p-value at which two runs are reported as different."""


def render(comparison: JSON, runs: Sequence[FinishedRun]) -> str:
    """Renders the page as HTML.

    Args:
        comparison: the result of `comparison.compare`.
        runs: the same runs.
    """
    rounds = {run.name: run.rounds for run in runs}
    deciding = list(dict.fromkeys(run.deciding for run in runs))
    return frame.fill(
        "comparison_page.html.j2",
        comparison=comparison,
        headline=headline(comparison),
        apart={subject: fact["said"] for subject, fact in comparison["shared"].items() if not fact["same"]},
        marks=marks(rounds),
        span=span([row["final"] for row in comparison["runs"]]),
        charts=[(chart, figure_of_runs(chart, rounds)) for chart in shared_charts(deciding)],
    )


def headline(comparison: JSON) -> str:
    """A sentence that names the best run, and the runs that differ from the first by more than sampling in the
    evaluation explains.

    It makes no claim about algorithms, which would need several training seeds of each.
    """
    rows: list[JSON] = comparison["runs"]
    first, others = rows[0], rows[1:]
    if reasons := sorted({row["difference"]["reason"] for row in others} - {None}):
        return (
            f"{len(rows)} runs, whose final accuracies cannot all be compared with that of {first['run']}, the first: "
            f"some have {' or '.join(reasons)}."
        )
    best = max((row["final"] for row in rows), key=lambda final: final["accuracy"])
    names = [row["run"] for row in rows if math.isclose(row["final"]["accuracy"], best["accuracy"])]
    accuracy, problems = frame.percent(best["accuracy"]), frame.format_number(best["prompts"])
    beyond = [row for row in others if row["difference"]["p_holm"] <= ALPHA]
    within = [row for row in others if row not in beyond]
    against = f"from {first['run']} ({frame.percent(first['final']['accuracy'])})"
    explained = "than the sampling of these problems and answers explains"
    if beyond:
        result = f"{_listed(beyond)} {'differ' if beyond[1:] else 'differs'} {against} by more {explained}"
        result += f"; {_listed(within)} {'do' if within[1:] else 'does'} not." if within else "."
    else:
        subject = "None of the others differs" if within[1:] else f"{_listed(within)} does not differ"
        result = f"{subject} {against} by more {explained}."
    seeds = (
        "Training seeds were not varied: each run was trained once"
        if comparison["shared"]["seed"]["same"]
        else "Each run was trained once, with its own seed"
    )
    return (
        f"Of {len(rows)} runs, {frame.end_best(names)}: {accuracy} of the answers to {problems} held-out problems are "
        "right. "
        f"{result} {seeds}, and another seed could order them differently."
    )


def _listed(rows: Sequence[JSON]) -> str:
    """Lists runs with their differences from the first in percentage points: `a (+1.0), b (-2.0) and c (+0.5)`."""
    return frame.listed([f"{row['run']} ({frame.points(row['difference']['value'])})" for row in rows])


def span(estimates: Sequence[JSON]) -> tuple[float, float]:
    """The smallest range that contains all these intervals and ends at multiples of 10%."""
    low = min(estimate["ci95"][0] for estimate in estimates)
    high = max(estimate["ci95"][1] for estimate in estimates)
    start, end = math.floor(low * 10) / 10, math.ceil(high * 10) / 10
    return (start, end) if end > start else (max(0.0, start - 0.1), min(1.0, end + 0.1))
