"""What an experiment shows so far: its arms over their seeds, all pairs of arms, each varied key, each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.config import JSON
from rloo_pipeline.diagnosis import run_files
from rloo_pipeline.errors import UserError
from rloo_pipeline.evaluation.across_seeds import FEWEST, Comparison, compare_arms, summarize_arm
from rloo_pipeline.evaluation.completions import is_correct
from rloo_pipeline.evaluation.statistics import Array, holm
from rloo_pipeline.report import finished
from rloo_pipeline.report.finished import Finished
from rloo_pipeline.seeds import derive

FILE = "experiment.yaml"
"""File in the folder of an experiment that Snakemake's process writes: its name, base, arms and seeds."""


SMALLEST_P = 0.001
"""Smallest p-value that the LaTeX table writes out."""


class FinishedExperiment(NamedTuple):
    """An experiment with the runs of it that are finished."""

    name: str
    arms: Mapping[str, JSON]
    """Name → the keys that it changes. The first is the baseline."""
    vary: Mapping[str, Sequence[Any]]
    seeds: Sequence[int]
    runs: Mapping[str, Mapping[int, Finished]]
    """Arm → seed → run."""
    states: Sequence[JSON]
    """Of every run: arm, seed, folder, rounds done, whether it is finished, its symptoms."""
    selection: JSON | None = None
    """selection.json, once `select` has chosen."""
    tests: Sequence[Array] = ()
    """Of what was chosen: the share of right samples on the test rows, [prompts] for each seed."""


def read(folder: Path) -> FinishedExperiment:
    """Reads the experiment in a folder.

    Raises:
        UserError: the folder has no experiment, or no run of it is finished.
    """
    file = folder / FILE
    if not file.exists():
        raise UserError(f"{folder}: not the folder of an experiment, since it has no {FILE}")
    about = yaml.safe_load(file.read_text(encoding="utf-8"))
    runs: dict[str, dict[int, Finished]] = {arm: {} for arm in about["arms"]}
    states = []
    for arm in about["arms"]:
        for seed in about["seeds"]:
            place = folder / arm / str(seed)
            files = run_files.read(place)
            is_finished = (place / "summary.json").exists()
            if is_finished:
                runs[arm][seed] = finished.read(place)
            state = {"arm": arm, "seed": seed, "folder": f"{arm}/{seed}", "rounds": len(files.rounds)}
            symptoms = list(dict.fromkeys(symptom.title for symptom in files.symptoms()))
            states.append(state | {"planned": files.config.rounds, "finished": is_finished, "symptoms": symptoms})
    if not any(runs.values()):
        raise UserError(f"{folder}: no run of the experiment is finished")
    facts = (about["experiment"], about["arms"], about["vary"], about["seeds"])
    return FinishedExperiment(*facts, runs, states, *_choice(folder, runs))


def _choice(folder: Path, runs: Mapping[str, Mapping[int, Finished]]) -> tuple[JSON | None, Sequence[Array]]:
    """selection.json and the tests of what was chosen; nothing of both where the runs choose nothing or not yet.

    Raises:
        UserError: a test is missing or damaged, or not of what was chosen.
    """
    file = folder / "selection.json"
    configs = [run.config for of_arm in runs.values() for run in of_arm.values()]
    if not configs[0].select or not file.exists():
        return None, ()
    selection, tests = read_artifact(file), []
    for chosen in selection["chosen"]:
        run = runs[selection["arm"]].get(chosen["seed"])
        place = folder / "test" / str(chosen["seed"])
        if run is None or not (place / "summary.json").exists():
            return None, ()
        read_artifact(place / "summary.json", evaluated="test", policy=chosen["policy"])
        samples = run.config.evaluation.num_generations
        table = tables.read(place / "completions.parquet", "completions", policy=chosen["policy"])
        tests.append(is_correct(table, run.config.rewards, run.config.correct, samples).mean(axis=1))
    return selection, tests


def summary_of(experiment: FinishedExperiment) -> JSON:
    """The content of experiment.json."""
    arms = {arm: runs for arm, runs in experiment.runs.items() if runs}
    first = next(iter(next(iter(arms.values())).values()))
    resamples = first.config.evaluation.bootstrap_samples
    seed = derive(first.config.seed, "experiment")
    comparisons = _comparisons(arms, resamples, seed)
    corrected = holm({f"{row['arm']} {row['less']}": row["p"] for row in comparisons})
    for row in comparisons:
        row["p_holm"] = corrected[f"{row['arm']} {row['less']}"]
    rows = [_arm(arm, runs, experiment, resamples, seed) for arm, runs in arms.items()]
    return {
        "experiment": experiment.name,
        "baseline": rows[0]["arm"],
        "seeds": list(experiment.seeds),
        "enough_seeds": min(len(runs) for runs in arms.values()) >= FEWEST,
        "arms": rows,
        "comparisons": comparisons,
        "sensitivity": _sensitivity(experiment, {row["arm"]: row["mean"]["value"] for row in rows}),
        "runs": [_run(state, experiment) for state in experiment.states],
        "rows": "dev" if first.config.select else "eval",
        "selection": _selection(experiment, resamples, seed),
    }


def _selection(experiment: FinishedExperiment, resamples: int, seed: int) -> JSON | None:
    """What was chosen on dev, and its accuracy on test over seeds."""
    if experiment.selection is None:
        return None
    values = np.stack(experiment.tests)
    test = summarize_arm(values, resamples, seed)
    shown = {"accuracies": [float(value) for value in values.mean(axis=1)], "prompts": values.shape[1]}
    return experiment.selection | {"test": shown | {"mean": test.mean._asdict(), "iqm": test.iqm._asdict()}}


def _arm(arm: str, runs: Mapping[int, Finished], experiment: FinishedExperiment, resamples: int, seed: int) -> JSON:
    values = _values(list(runs.values()))
    if values is None:
        raise UserError(f"{experiment.name}, arm {arm}: its seeds were not evaluated on the same held-out prompts")
    summary = summarize_arm(values, resamples, seed)
    start = [run.summary["warmstart"]["accuracy"] for run in runs.values()]
    return {
        "arm": arm,
        "changes": experiment.arms[arm],
        "seeds": list(runs),
        "accuracies": [float(accuracy) for accuracy in values.mean(axis=1)],
        "warmstart": float(np.mean(start)),
        "mean": summary.mean._asdict(),
        "iqm": summary.iqm._asdict(),
        "tokens": sum(run.summary["tokens"]["rollouts"] for run in runs.values()),
        "seconds": round(sum(sum(run.seconds.values()) for run in runs.values()), 1),
    }


def _values(runs: Sequence[Finished]) -> Array | None:
    """Accuracy of runs, [runs, prompts]; None if they were not evaluated on the same prompts."""
    if any(run.held_out_prompts != runs[0].held_out_prompts for run in runs):
        return None
    return np.stack([run.accuracy for run in runs])


def _comparisons(arms: Mapping[str, Mapping[int, Finished]], resamples: int, seed: int) -> list[JSON]:
    """Every later arm less every earlier one, over the seeds that both have."""
    rows = []
    for less, arm in combinations(arms, 2):
        seeds = [one for one in arms[arm] if one in arms[less]]
        tables = _values([arms[name][one] for name in (arm, less) for one in seeds]) if seeds else None
        row: JSON = {"arm": arm, "less": less, "seeds": seeds} | dict.fromkeys(Comparison._fields)
        if tables is not None:
            row |= compare_arms(tables[: len(seeds)], tables[len(seeds) :], resamples, seed)._asdict()
        rows.append(row)
    return rows


def _sensitivity(experiment: FinishedExperiment, means: Mapping[str, float]) -> list[JSON]:
    """For each varied key and value, the mean over the arms with that value."""
    rows = []
    for key, values in experiment.vary.items():
        for value in values:
            with_value = [means[arm] for arm in means if experiment.arms[arm].get(key) == value]
            if with_value:
                rows.append({"key": key, "value": value, "mean": float(np.mean(with_value)), "arms": len(with_value)})
    return rows


def _run(state: JSON, experiment: FinishedExperiment) -> JSON:
    run = experiment.runs[state["arm"]].get(state["seed"])
    if run is None:
        return state | {"warmstart": None, "final": None, "seconds": None}
    ends = {end: run.summary[end]["accuracy"] for end in ("warmstart", "final")}
    return state | ends | {"seconds": round(sum(run.seconds.values()), 1)}


def arms_table(summary: JSON) -> list[list[str]]:
    """The arms for a CSV file: a head, and a row for each arm with its difference from the baseline."""
    against = {row["arm"]: row for row in summary["comparisons"] if row["less"] == summary["baseline"]}
    head = ["arm", "seeds", "mean", "mean_low", "mean_high", "iqm", "iqm_low", "iqm_high"]
    head += ["difference", "difference_low", "difference_high", "p_holm", "chance_of_improvement", "seeds_for_80_power"]
    table = [[*head, "tokens", "seconds"]]
    for row in summary["arms"]:
        compared = against.get(row["arm"], {})
        cells: list[Any] = [row["arm"], len(row["seeds"])]
        for part in (row["mean"], row["iqm"], compared):
            cells += [part.get("value"), *(part.get("ci95") or (None, None))]
        cells += [compared.get(key) for key in ("p_holm", "improvement", "seeds_needed")]
        table.append([_cell(cell) for cell in [*cells, row["tokens"], row["seconds"]]])
    return table


def runs_table(summary: JSON) -> list[list[str]]:
    """The runs for a CSV file."""
    head = ["arm", "seed", "finished", "rounds", "warmstart", "final", "seconds", "symptoms"]
    rows = [[*(run[key] for key in head[:-1]), "; ".join(run["symptoms"])] for run in summary["runs"]]
    return [head, *([_cell(cell) for cell in row] for row in rows)]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def latex_table(summary: JSON) -> str:
    """The arms as a LaTeX table with booktabs and its caption."""
    against = {row["arm"]: row for row in summary["comparisons"] if row["less"] == summary["baseline"]}
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_caption(summary)}}}",
        rf"\label{{tab:{summary['experiment']}}}",
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r"arm & mean & IQM & difference & $p$ \\",
        r"\midrule",
    ]
    for row in summary["arms"]:
        compared = against.get(row["arm"], {"value": None})
        p = compared.get("p_holm")
        cells = [_tex(row["arm"]), _with_interval(row["mean"]), _with_interval(row["iqm"]), _with_interval(compared)]
        shown = "--" if p is None else f"{p:.3f}" if p >= SMALLEST_P else rf"$<{SMALLEST_P}$"
        lines.append(" & ".join([*cells, shown]) + r" \\")
    if chosen := summary["selection"]:
        cells = [f"{_tex(chosen['arm'])}, test", *(_with_interval(chosen["test"][part]) for part in ("mean", "iqm"))]
        lines += [r"\midrule", " & ".join([*cells, "--", "--"]) + r" \\"]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _caption(summary: JSON) -> str:
    """What the LaTeX table shows; without intervals where there are too few seeds for them."""
    rows = "Dev" if summary["rows"] == "dev" else "Held-out"
    seeds = " to ".join(map(str, sorted({f(len(row["seeds"]) for row in summary["arms"]) for f in (min, max)})))
    intervals = r" with 95\% intervals of the hierarchical bootstrap over seeds and prompts"
    corrected = rf", with $p$ corrected by Holm over all {len(summary['comparisons'])} comparisons"
    few = rf" With fewer than {FEWEST} seeds there are no intervals."
    return (
        rf"{rows} pass@1 (\%) in {_tex(summary['experiment'])}: mean and interquartile mean over {seeds} "
        rf"seed{'' if seeds == '1' else 's'}{intervals if summary['enough_seeds'] else ''}; difference from "
        rf"{_tex(summary['baseline'])} in points, paired by seed and prompt"
        rf"{corrected if summary['enough_seeds'] else ''}.{'' if summary['enough_seeds'] else few}"
    )


def _with_interval(estimate: Mapping[str, Any]) -> str:
    if estimate["value"] is None:
        return "--"
    interval = estimate.get("ci95")
    shown, *ends = (f"${100 * value:.1f}$" for value in (estimate["value"], *(interval or ())))
    return f"{shown} [{', '.join(ends)}]" if ends else shown


def _tex(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "#$%&_{}" else letter for letter in text)
