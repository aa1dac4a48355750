"""Renders experiment.html, one self-contained page that shows an experiment arm by arm."""

from collections.abc import Callable, Mapping, Sequence
from math import isclose
from pathlib import Path

from rloo_pipeline.config import JSON
from rloo_pipeline.judging.across_seeds import FEWEST, FEWEST_FOR_IQM
from rloo_pipeline.report import frame
from rloo_pipeline.report.charts import CHARTS, Chart
from rloo_pipeline.report.comparison_page import ALPHA, span
from rloo_pipeline.report.experiment_summary import FinishedExperiment, without_baseline
from rloo_pipeline.report.figures import Rounds, figure_of_arms, marks
from rloo_pipeline.report.finished import FinishedRun


def render(summary: JSON, experiment: FinishedExperiment, folder: Path) -> str:
    """Renders the page as HTML.

    Args:
        summary: the result of `experiment_summary.summary_of`.
        experiment: the same experiment.
        folder: the experiment's folder.
    """
    arms = {arm: list(runs.values()) for arm, runs in experiment.runs.items() if runs}
    of_each_round = {measured["prompts"] for runs in arms.values() for run in runs for measured in run.held_out}
    each_round_differs = len(of_each_round) > 1
    of_runs = {name: of for name, of in OF_RUN.items() if name != "each_round" or not each_round_differs}
    return frame.fill(
        "experiment_page.html.j2",
        summary=summary,
        folder=frame.folder_name(folder, experiment.name),
        headline=headline(summary),
        by_pair={(row["arm"], row["less"]): row for row in summary["comparisons"]},
        marks=marks(arms),
        span=span([_estimate(row) for row in summary["arms"]]),
        fewest=FEWEST,
        fewest_for_iqm=FEWEST_FOR_IQM,
        each_round_differs=each_round_differs,
        versions=sorted({version for runs in arms.values() for run in runs for version in _versions(run)}),
        charts=[
            (chart, figure_of_arms(chart, {arm: [of(run) for run in runs] for arm, runs in arms.items()}))
            for chart, of in [
                *((CHARTS["arms"][name], of) for name, of in of_runs.items()),
                *((chart, _rounds) for chart in functions(arms)),
            ]
        ],
    )


def _estimate(row: JSON) -> JSON:
    """An arm's interval; if it has none, the range over its seeds."""
    values = row["accuracies"]
    return {"ci95": row["mean"]["ci95"] or (min(values), max(values))}


def functions(arms: Mapping[str, Sequence[FinishedRun]]) -> list[Chart]:
    """A chart of each reward function and monitor; none if the only function is the reward."""
    rewards = {reward.column: None for runs in arms.values() for run in runs for reward in run.config.rewards}
    return [
        CHARTS["arms"]["reward"]._replace(
            title=f"{name} by round",
            caption="The mean score of this function alone.",
            lines={f"rewards/{name}/mean": name},
        )
        for name in (rewards if len(rewards) > 1 else ())
    ]


def _versions(run: FinishedRun) -> list[str]:
    """The versions of this package that a run has used."""
    name = "rloo_pipeline"
    return [run.summary["versions"][name], *run.summary.get("earlier_versions", {}).get(name, ())]


def _rounds(run: FinishedRun) -> Rounds:
    return run.rounds


def _evaluations(run: FinishedRun) -> list[Mapping[str, float | None]]:
    """The accuracies of a run, as the rounds of a chart."""
    names = run.config.evaluated
    between = {names[name]: evaluation["accuracy"] for name, evaluation in run.summary["between"].items()}
    ends = {names[name]: run.summary[name]["accuracy"] for name in ("warmstart", "final")}
    return [{"round": number, "accuracy": value} for number, value in sorted({**between, **ends}.items())]


def _each_round(run: FinishedRun) -> list[Mapping[str, float | None]]:
    """Accuracies on the problems of each round, by the policy that answered. With a lag, a policy may answer in several
    rounds.
    """
    by_policy = {measured["policy"]: measured["accuracy"] for measured in run.held_out}
    return [{"round": number, "accuracy": value} for number, value in sorted(by_policy.items())]


OF_RUN: Mapping[str, Callable[[FinishedRun], Rounds]] = {
    "held_out": _evaluations,
    "each_round": _each_round,
    "reward": _rounds,
}
"""The function for a run's values, by the name of the chart. `each_round` is left out if runs measured it on different
numbers of problems.
"""


def headline(summary: JSON) -> str:
    """A sentence that names the best arm, and the arms that differ from the baseline by more than seeds and prompts
    explain.
    """
    rows: list[JSON] = summary["arms"]
    counts = sorted({len(row["seeds"]) for row in rows})
    seeds = f"{' to '.join(map(str, {counts[0]: 0, counts[-1]: 0}))} seed{'s' if counts[-1] > 1 else ''}"
    begin = f"Of {len(rows)} arms with {seeds} each, "
    if len(rows) == 1:
        arm, right = rows[0]["arm"], frame.percent(rows[0]["mean"]["value"])
        begin = f"Only {arm} has finished runs, {seeds}: {right} of its answers to held-out problems are right."
    elif any(row["reason"] for row in summary["comparisons"]):
        begin += "none can be called best, since not all were evaluated in the same way."
    else:
        best = max(row["mean"]["value"] for row in rows)
        names = [row["arm"] for row in rows if isclose(row["mean"]["value"], best)]
        begin += (
            f"{frame.end_best(names)} on average: {frame.percent(best)} of the answers to held-out problems are right."
        )
    if missing := without_baseline(summary):
        begin += f" {missing}"
    if not summary["enough_seeds"]:
        return (
            f"{begin} With fewer than {FEWEST} seeds, nothing can be said about training: another seed could order the "
            "arms differently."
        )
    baseline = summary["baseline"]
    against = [row for row in summary["comparisons"] if row["less"] == baseline]
    tested = [row for row in against if row["p_holm"] is not None]
    beyond = [f"{row['arm']} ({frame.points(row['value'])} points)" for row in tested if row["p_holm"] <= ALPHA]
    if beyond:
        begin += f" From {baseline} differ by more than seeds and problems explain: {', '.join(beyond)}."
    elif tested and all(row["p_smallest"] > ALPHA for row in tested):
        smallest = frame.chance(min(row["p_smallest"] for row in tested))
        begin += (
            f" There are too few seeds to show that an arm differs from {baseline}: no corrected p-value can be "
            f"below {smallest}."
        )
    elif tested:
        begin += f" No arm differs from {baseline} by more than seeds and problems explain."
    untested = [f"{row['arm']} ({row['reason'] or 'too few common seeds'})" for row in against if row["p_holm"] is None]
    if untested:
        begin += f" Not compared with {baseline}: {', '.join(untested)}."
    return begin
