"""Summarizes an experiment so far: each arm over its seeds, all pairs of arms, each varied key, each run."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rloo_pipeline.artifacts import lineage, tables
from rloo_pipeline.artifacts.files import check_facts, read_artifact
from rloo_pipeline.checks.statistics import RESAMPLES, Array, holm
from rloo_pipeline.config import JSON
from rloo_pipeline.config.loading import read_mapping
from rloo_pipeline.config.run_set import EXPERIMENT
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging import run_files
from rloo_pipeline.judging.across_seeds import FEWEST, Comparison, compare_arms, smallest_p, summarize_arm
from rloo_pipeline.judging.completions import is_correct
from rloo_pipeline.report import finished
from rloo_pipeline.report.comparison import incomparable
from rloo_pipeline.report.finished import FinishedRun, OutdatedEvaluationError
from rloo_pipeline.seeds import derive


class FinishedExperiment(NamedTuple):
    """An experiment and those of its runs that are finished."""

    name: str
    arms: Mapping[str, JSON]
    """Name → the keys that it changes. The first is the baseline."""
    vary: Mapping[str, Sequence[Any]]
    seeds: Sequence[int]
    runs: Mapping[str, Mapping[int, FinishedRun]]
    """Arm → seed → run."""
    states: Sequence[JSON]
    """One object per run: arm, seed, folder, rounds done and planned, whether a gate ended it early, whether it is
    finished, its symptoms.
    """
    selection: JSON | None = None
    """selection.json, once `select` has chosen."""
    tests: Sequence[Array] = ()
    """The chosen policies' share of right samples on the test rows, [prompts] for each seed."""


def read(folder: Path) -> FinishedExperiment:
    """Reads the experiment in a folder.

    Raises:
        UserError: the folder has no experiment, or no run of it is finished.
    """
    file = folder / EXPERIMENT
    if not file.exists():
        raise UserError(f"{folder}: not the folder of an experiment, since it has no {EXPERIMENT}")
    about = read_mapping(file)
    runs: dict[str, dict[int, FinishedRun]] = {arm: {} for arm in about["arms"]}
    states = []
    for arm in about["arms"]:
        for seed in about["seeds"]:
            run_folder = folder / arm / str(seed)
            files = run_files.read(run_folder)
            if run_files.is_finished(run_folder, files.config):
                with suppress(OutdatedEvaluationError):  # by its changed config.yaml, it is not finished
                    runs[arm][seed] = finished.read(run_folder)
            state = {"arm": arm, "seed": seed, "folder": f"{arm}/{seed}", "rounds": len(files.rounds)}
            symptoms = list(dict.fromkeys(symptom.title for symptom in files.symptoms()))
            planned = about["rounds"][arm]
            # if a gate ended a run, its config.yaml has fewer rounds than planned
            state |= {"planned": planned, "stopped": files.config.rounds < planned}
            states.append(state | {"finished": seed in runs[arm], "symptoms": symptoms})
    if not any(runs.values()):
        raise UserError(
            f"{folder}: no run of the experiment is finished; finish one with `rloo run`, or if this is a copy, "
            "make it with `cp -a`, which keeps the times of files"
        )
    facts = (about["experiment"], about["arms"], about["vary"], about["seeds"])
    return FinishedExperiment(*facts, runs, states, *_choice(folder, runs))


def _choice(folder: Path, runs: Mapping[str, Mapping[int, FinishedRun]]) -> tuple[JSON | None, Sequence[Array]]:
    """selection.json and the tests of the choice; empty if there is no selection, or none has been made yet.

    Raises:
        UserError: a test is missing or damaged, or does not belong to the chosen policy.
    """
    file = folder / "selection.json"
    configs = [run.config for of_arm in runs.values() for run in of_arm.values()]
    if not configs[0].select or not file.exists():
        return None, ()
    selection, tests = read_artifact(file), []
    for chosen in selection["chosen"]:
        run = runs.get(selection["arm"], {}).get(chosen["seed"])
        run_folder = folder / "test" / str(chosen["seed"])
        if run is None or not (run_folder / "summary.json").exists():
            return None, ()
        check_facts(file, chosen, lineage.named_policy(folder / chosen["run"], chosen["round"]))
        read_artifact(run_folder / "summary.json", evaluated="test", policy=chosen["policy"])
        table = tables.read(run_folder / "completions.parquet", "completions", policy=chosen["policy"])
        tests.append(is_correct(run.config, table, run.config.evaluation.num_generations).mean(axis=1))
    return selection, tests


def summary_of(experiment: FinishedExperiment) -> JSON:
    """Builds the content of experiment.json."""
    arms = {arm: runs for arm, runs in experiment.runs.items() if runs}
    first = next(iter(next(iter(arms.values())).values()))
    comparisons = _comparisons(arms, derive(first.config.seed, "experiment"))
    corrected = holm({f"{row['arm']} {row['less']}": row["p"] for row in comparisons})
    tests = sum(row["p"] is not None for row in comparisons)
    for row in comparisons:
        row["p_holm"] = corrected[f"{row['arm']} {row['less']}"]
        # Holm's smallest corrected p-value is the smallest p-value times the number of tests
        row["p_smallest"] = None if row["p"] is None else min(1.0, tests * smallest_p(len(row["seeds"])))
    rows = [_arm(arm, runs, experiment) for arm, runs in arms.items()]
    return {
        "experiment": experiment.name,
        "baseline": next(iter(experiment.arms)),
        "seeds": list(experiment.seeds),
        "enough_seeds": min(len(runs) for runs in arms.values()) >= FEWEST,
        "arms": rows,
        "comparisons": comparisons,
        "sensitivity": _sensitivity(experiment),
        "runs": [_run(state, experiment) for state in experiment.states],
        "rows": "dev" if first.config.select else "eval",
        "selection": _selection(experiment),
    }


def without_baseline(summary: JSON) -> str:
    """A sentence if the baseline has no finished run; otherwise empty."""
    baseline = summary["baseline"]
    if any(row["arm"] == baseline for row in summary["arms"]):
        return ""
    return f"{baseline}, the baseline, has no finished run, so no arm is compared with it."


def _selection(experiment: FinishedExperiment) -> JSON | None:
    """The choice on dev, with its accuracy on test over seeds."""
    if experiment.selection is None:
        return None
    values = np.stack(experiment.tests)
    shown = {"accuracies": [float(value) for value in values.mean(axis=1)], "prompts": values.shape[1]}
    return experiment.selection | {"test": shown | _over_seeds(values)}


def _over_seeds(values: Array) -> JSON:
    """An arm's mean and interquartile mean, [seeds, prompts] → JSON. With few seeds there is no interquartile mean."""
    return {part: estimate and estimate._asdict() for part, estimate in summarize_arm(values)._asdict().items()}


def _arm(arm: str, runs: Mapping[int, FinishedRun], experiment: FinishedExperiment) -> JSON:
    if reason := incomparable(list(runs.values()), across_seeds=True):
        raise UserError(
            f"{experiment.name}, arm {arm}: its seeds have no mean, since some have {reason}; run the experiment again"
        )
    values = np.stack([run.accuracy for run in runs.values()])
    start = [run.summary["warmstart"]["accuracy"] for run in runs.values()]
    return {
        "arm": arm,
        "changes": experiment.arms[arm],
        "seeds": list(runs),
        "accuracies": [float(accuracy) for accuracy in values.mean(axis=1)],
        "warmstart": float(np.mean(start)),
        **_over_seeds(values),
        "tokens": sum(run.summary["tokens"]["rollouts"] for run in runs.values()),
        "seconds": round(sum(sum(run.seconds.values()) for run in runs.values()), 1),
    }


def _comparisons(arms: Mapping[str, Mapping[int, FinishedRun]], seed: int) -> list[JSON]:
    """Compares all pairs of arms: the later minus the earlier over their common seeds, or the reason why that is
    impossible.
    """
    rows = []
    for less, arm in combinations(arms, 2):
        seeds = [common for common in arms[arm] if common in arms[less]]
        reason = incomparable([*arms[less].values(), *arms[arm].values()], across_seeds=True)
        row: JSON = {"arm": arm, "less": less, "seeds": seeds, "reason": reason} | dict.fromkeys(Comparison._fields)
        if seeds and reason is None:
            values, others = (np.stack([arms[name][common].accuracy for common in seeds]) for name in (arm, less))
            row |= compare_arms(values, others, RESAMPLES, seed)._asdict()
        rows.append(row)
    return rows


def _sensitivity(experiment: FinishedExperiment) -> list[JSON]:
    """For each value of each varied key, the mean over the arms that have it, and over the seeds that all arms have.
    Empty if the arms have no seed in common, or cannot be compared.
    """
    arms = experiment.runs
    seeds = set[int](experiment.seeds).intersection(*arms.values())
    if not seeds or incomparable([run for runs in arms.values() for run in runs.values()], across_seeds=True):
        return []
    means = {arm: np.mean([runs[seed].accuracy.mean() for seed in sorted(seeds)]) for arm, runs in arms.items()}
    rows = []
    for key, values in experiment.vary.items():
        for value in values:
            with_value = [means[arm] for arm in means if experiment.arms[arm].get(key) == value]
            if with_value:
                mean, count = float(np.mean(with_value)), len(with_value)
                rows.append({"key": key, "value": value, "mean": mean, "arms": count, "seeds": sorted(seeds)})
    return rows


def _run(state: JSON, experiment: FinishedExperiment) -> JSON:
    run = experiment.runs[state["arm"]].get(state["seed"])
    if run is None:
        return state | {"warmstart": None, "final": None, "seconds": None}
    ends = {end: run.summary[end]["accuracy"] for end in ("warmstart", "final")}
    return state | ends | {"seconds": round(sum(run.seconds.values()), 1)}
