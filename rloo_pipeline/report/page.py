"""Renders report.html, one self-contained page about a run, from its files, at its end or while it is in progress.

Times, costs and machines on the page come from logs and benchmarks. Everything else is the same wherever and whenever
it is made.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rloo_pipeline import frozen_functions
from rloo_pipeline.artifacts.files import REMEDY, read_artifact
from rloo_pipeline.checks.registry import threshold
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.judging.completions import score_names
from rloo_pipeline.judging.run_files import RunFiles, of_same_prompts, read_held_out, read_metrics
from rloo_pipeline.report import frame, jobs, samples
from rloo_pipeline.report.charts import CHARTS, Chart, charts
from rloo_pipeline.report.dag import picture
from rloo_pipeline.report.figures import bars, figure, timeline
from rloo_pipeline.report.origin import origin
from rloo_pipeline.report.summary import training_prompts
from rloo_pipeline.runtime import installation, late_files


def render(config: Config, run: Path, summary: dict[str, Any]) -> str:
    """Renders the page as HTML.

    Args:
        config: the section `report`.
        run: the run's folder.
        summary: summary of a finished run, or the result of `so_far` for one in progress.

    Raises:
        UserError: a file of the run is missing or damaged.
    """
    finished = summary["final"] is not None
    numbers = range(1, summary["rounds"] + 1)
    rounds = [read_metrics(run, number) for number in numbers]
    files = RunFiles(run, config, [*rounds])
    measured = read_held_out(run, numbers) if finished else files.held_out()
    held_out = of_same_prompts(measured)
    first = summary["warmstart"]
    named = {"warmstart": first, **summary["between"], "final": summary["final"]}
    evaluations = {name: evaluation for name, evaluation in named.items() if evaluation}
    checks = _read_if_exists(run / "warmstart" / "checks.json", **({"policy": first["policy"]} if first else {}))
    stopped = None if checks or summary["rounds"] else _read_if_exists(run / "warmstart" / "checks.failed.json")
    chosen = training_prompts(config, run)
    written = run / "config.yaml"
    begun = min(summary["rounds"] + 1 + config.rollout.lag, config.rounds)
    worked = jobs.jobs_of(run, begun)
    return frame.fill(
        "page.html.j2",
        config=config,
        folder=(folder := frame.folder_name(run, config.run)),
        summary=summary,
        held_out=held_out,
        other_held_out=len(measured) - len(held_out),
        ended_by_gate=files.ended_by_gate,
        reward_names=score_names(config.rewards),
        deciding=config.deciding_reward.column,
        evaluations=evaluations,
        checks=checks or stopped,
        stopped=stopped,
        threshold=threshold,
        symptoms=files.symptoms({config.evaluated[name]: evaluation for name, evaluation in evaluations.items()}),
        charts=drawn_charts(config, rounds, evaluations, held_out),
        chosen_prompts=chosen,
        figures={
            **check_figures(checks or stopped or {}),
            **prompt_figures(chosen or {}),
            "plot-timeline": timeline(worked),
        },
        examples=samples.held_out_examples(config, run) if finished else [],
        groups=samples.probed(config, run) if stopped else samples.groups(config, run, summary["rounds"]),
        origin=origin(),
        in_clone=(clone := installation.clone()) is not None and run.resolve().is_relative_to(clone),
        functions=(copies := frozen_functions.near(run))
        and os.path.normpath(f"{folder}/{os.path.relpath(copies, run)}"),
        yaml=written.read_text(encoding="utf-8") if written.exists() else None,
        verdict=verdict(summary) if finished else None,
        costs=(costs := jobs.costs(worked)),
        total=jobs.total_cost("all jobs", worked),
        gpus=sorted({job.gpu for job in worked if job.gpu}),
        spent=jobs.spent(worked),
        picture=picture(costs),
    )


def _read_if_exists(file: Path, **expected: object) -> JSON | None:
    return read_artifact(file, REMEDY, **expected) if late_files.exists(file) else None


def drawn_charts(
    config: Config, rounds: Sequence[JSON], evaluations: Mapping[str, JSON], held_out: Sequence[JSON]
) -> list[tuple[Chart, JSON | None]]:
    """The charts with their figures. Accuracy by round comes first if intermediate policies were measured."""
    drawn = [(chart, figure(chart, rounds)) for chart in charts(config)]
    if held_out or len(evaluations) > 2:
        chart = CHARTS["accuracy"]["each_round" if held_out else "by_round"]
        drawn.insert(0, (chart, figure(chart, by_round(config.evaluated, evaluations, held_out))))
    return drawn


def by_round(
    evaluated: Mapping[str, int], evaluations: Mapping[str, JSON], held_out: Sequence[JSON]
) -> list[dict[str, float | None]]:
    """Held-out accuracy as rows of metrics, one per policy.

    Args:
        evaluated: number of the evaluated policy, by the name of the evaluation.
        evaluations: evaluations by name.
        held_out: accuracies on the first problems, of the policy before each round. If there are any, the interval is
            theirs.
    """
    rows: dict[int, dict[str, float | None]] = {}
    for name, evaluation in evaluations.items():
        greedy = evaluation["greedy"]
        row = {"accuracy": evaluation["accuracy"], "greedy": greedy["accuracy"] if greedy else None}
        rows[evaluated[name]] = row if held_out else row | _interval(evaluation)
    for measured in held_out:
        row = {"each_round": measured["accuracy"], **_interval(measured)}
        rows[measured["policy"]] = rows.get(measured["policy"], {}) | row
    return [{"round": number, **rows[number]} for number in sorted(rows)]


def _interval(evaluation: JSON) -> dict[str, float | None]:
    return dict(zip(("low", "high"), evaluation["ci95"], strict=True))


def check_figures(checks: JSON) -> dict[str, JSON]:
    """The distributions behind the checks, by element id."""
    figures = {}
    if lengths := checks.get("lengths"):
        middles = [(low + high) / 2 for low, high in pairwise(lengths["edges"])]
        figures["plot-lengths"] = bars(middles, lengths["counts"], "tokens")
    if right := checks.get("right_in_group"):
        figures["plot-right"] = bars(list(range(len(right))), right, "right answers in a group")
    if mixed := checks.get("expected_mixed"):
        by_size = {samples: mixed[samples] for samples in sorted(mixed, key=int)}
        figures["plot-mixed"] = bars(list(by_size), list(by_size.values()), "K", ".0%")
    return figures


def prompt_figures(chosen: JSON) -> dict[str, JSON]:
    """The distribution of policy 0's pass rates, by element id."""
    right = chosen.get("right")
    if right is None:
        return {}
    return {
        "plot-pass-rates": bars([f"{count / (len(right) - 1):.0%}" for count in range(len(right))], right, "pass rate")
    }


def verdict(summary: JSON) -> str:
    """Explains the gain's interval and p-value in one sentence, for readers who know neither."""
    low, high = summary["gain_ci95"]
    if not low <= 0 <= high and summary["gain_p_holm"] > 0.05:
        return (
            "By itself the interval excludes 0, but with as many comparisons as this page makes, that can be chance: "
            "more held-out problems would tell."
        )
    if low > 0:
        return "The interval lies above 0: other problems of this kind would very probably show a gain too."
    if high < 0:
        return "The interval lies below 0: other problems of this kind would very probably show a loss too."
    if summary["gain_p_holm"] <= 0.05:
        return "The interval contains 0 although p is small: more held-out problems would tell."
    return "The interval contains 0: this evaluation cannot tell the change from chance."
