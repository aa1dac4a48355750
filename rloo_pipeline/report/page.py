"""report.html: one self-contained page about a run, made from its files.

Times, costs and machines on it come from logs and benchmarks; all else is the same wherever and whenever it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.checks.registry import threshold
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.diagnosis.diagnosis import Symptom, diagnose, monitors_of
from rloo_pipeline.diagnosis.run_files import metrics_of, read_evaluation
from rloo_pipeline.report import frame, jobs, samples, tasks
from rloo_pipeline.report.charts import Chart, ChartLine, charts
from rloo_pipeline.report.dag import picture
from rloo_pipeline.report.figures import bars, figure, timeline
from rloo_pipeline.report.origin import origin

BY_ROUND = Chart(
    "Held-out accuracy",
    "pass@1 of the evaluated policies, by the round that made them. Shaded: 95% interval.",
    (ChartLine("accuracy", "sampled"), ChartLine("greedy", "greedy")),
    ("low", "high"),
    tickformat=".0%",
    from_zero=False,
)


class GainParts(NamedTuple):
    """A gain in accuracy by cause, in shares of all completions; the three add up to the gain."""

    share: float
    """More (or fewer) completions have the property."""
    accuracy_with: float
    """Completions with the property are right more (or less) often."""
    accuracy_without: float
    """Completions without it are right more (or less) often."""


def render(config: Config, run: Path, summary: dict[str, Any]) -> str:
    """The page as HTML.

    Raises:
        UserError: a file of the run is missing or damaged.
    """
    rounds = [read_json(metrics_of(run, number)) for number in range(1, config.rounds + 1)]
    evaluations = {name: read_evaluation(run, name) for name in config.evaluated}
    checks = read_json(run / "warmstart" / "checks.json")
    trial, written = run / "warmstart" / "trial" / "checks.json", run / "config.yaml"
    properties = summary["final"]["breakdown"]
    worked = [job for job in jobs.jobs_of(run, config.rounds) if job.stage != "report"]
    return frame.fill(
        "page.html.j2",
        config=config,
        summary=summary,
        verdict=verdict(summary),
        reward_names=[*(reward.column for reward in config.rewards), "reward"],
        deciding=config.correct.reward or config.rewards[0].column,
        parts={name: parts_of_gain(summary["warmstart"], summary["final"], name) for name in properties},
        evaluations=evaluations,
        checks=checks,
        trial=read_json(trial) if trial.exists() else None,
        threshold=threshold,
        symptoms=symptoms(config, rounds, evaluations),
        charts=drawn_charts(config, rounds, evaluations),
        figures={**check_figures(checks), "plot-timeline": timeline(worked)},
        examples=samples.held_out_examples(config, run),
        groups=samples.groups(config, run),
        tasks=tasks.of_run(config, run),
        origin=origin(),
        yaml=written.read_text(encoding="utf-8") if written.exists() else None,
        **_costs(worked),
    )


def _costs(worked: Sequence[jobs.JobRecord]) -> dict[str, Any]:
    """The template's variables about time and machines."""
    costs = jobs.costs(worked)
    return {
        "costs": costs,
        "total": jobs.total_cost("all jobs", worked),
        "gpus": sorted({job.gpu for job in worked if job.gpu}),
        "spent": jobs.spent(worked),
        "picture": picture(costs),
    }


def drawn_charts(config: Config, rounds: Sequence[JSON], evaluations: JSON) -> list[tuple[Chart, JSON | None]]:
    """The charts with their figures; accuracy by round comes first if policies in between were evaluated."""
    drawn = [(chart, figure(chart, rounds)) for chart in charts(config.rewards)]
    if len(evaluations) > 2:
        drawn.insert(0, (BY_ROUND, figure(BY_ROUND, by_round(config, evaluations))))
    return drawn


def by_round(config: Config, evaluations: JSON) -> list[dict[str, float | None]]:
    """The evaluations as rows of metrics, one per evaluated policy."""
    rows: list[dict[str, float | None]] = []
    for name, number in config.evaluated.items():
        low, high = evaluations[name]["ci95"]
        greedy = evaluations[name]["greedy"]
        row = {"round": number, "accuracy": evaluations[name]["accuracy"], "low": low, "high": high}
        rows.append({**row, "greedy": greedy["accuracy"] if greedy else None})
    return rows


def symptoms(config: Config, rounds: Sequence[JSON], evaluations: JSON) -> list[Symptom]:
    """The symptoms of the training rounds."""
    by_number = {number: evaluations[name] for name, number in config.evaluated.items()}
    monitors = monitors_of(config.rewards)
    return diagnose(rounds, config.gates, monitors=monitors, evaluations=by_number, planned=config.rounds)


def check_figures(checks: JSON) -> dict[str, JSON]:
    """The distributions behind the checks, by the id of their element."""
    figures = {}
    if lengths := checks.get("lengths"):
        edges = lengths["edges"]
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        figures["plot-lengths"] = bars(middles, lengths["counts"], "tokens")
    if right := checks.get("right_in_group"):
        figures["plot-right"] = bars(list(range(len(right))), right, "right answers in a group")
    if mixed := checks.get("expected_mixed"):
        by_size = {samples: mixed[samples] for samples in sorted(mixed, key=int)}
        figures["plot-mixed"] = bars(list(by_size), list(by_size.values()), "K", ".0%")
    return figures


def verdict(summary: JSON) -> str:
    """The meaning of the gain's interval and p-value, in one sentence for readers who know neither."""
    low, high = summary["gain_ci95"]
    if not low <= 0 <= high and summary["gain_p_holm"] > 0.05:
        return (
            "By itself the interval excludes 0, but with as many comparisons as this page makes, that can be chance: "
            "more held-out problems would tell."
        )
    if low > 0:
        return "The interval lies above 0: other problems of this kind would very probably show a gain too."
    if high < 0:
        return "The interval lies below 0: the final policy is worse than the warm start, not just unlucky."
    return "The interval contains 0: this evaluation cannot tell the change from chance."


def parts_of_gain(before: JSON, after: JSON, name: str) -> GainParts | None:
    """Decomposes the gain by a property: each change is weighted by the mean of before and after (Kitagawa 1955).

    Args:
        before: the warm start's evaluation summary.
        after: the final policy's.
        name: the property's name in `breakdown`.

    Returns:
        None if a policy never or always has the property, because one of its two accuracies does not exist then.
    """
    first, last = before["breakdown"][name], after["breakdown"][name]
    if any(value is None for value in [*first.values(), *last.values()]):
        return None
    change = {key: last[key] - first[key] for key in first}
    mean = {key: (last[key] + first[key]) / 2 for key in first}
    return GainParts(
        change["share"] * (mean["accuracy_with"] - mean["accuracy_without"]),
        change["accuracy_with"] * mean["share"],
        change["accuracy_without"] * (1 - mean["share"]),
    )
