"""Measures `rollout.lag: 1` on the larger shape with a thread for each side: on two cores, against TRL, on SLURM."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import whole

ROUNDS = 6
LARGE = str(Path(__file__).with_name("large.yaml").relative_to(whole.ROOT))
Figures = dict[str, list[float]]


def in_turns(repeats: int, folder: Path, arguments: argparse.Namespace) -> Figures:
    """Rollouts beside updates (rollout.lag: 1) against one after the other, on two cores, in turns."""

    def run(project: whole.Project, lag: int, figures: Figures) -> float:
        seconds = project.rounds(ROUNDS).seconds
        whole.add(figures, f"round_lag_{lag}_seconds", project.seconds(ROUNDS))
        whole.add(figures, f"round_idle_share_lag_{lag}", [project.idle_share(ROUNDS)])
        return seconds

    return _with_and_without("overlap", repeats, folder, arguments, run)


def against_trl(_: int, folder: Path, arguments: argparse.Namespace) -> Figures:
    """rollout.lag: 1 against TRL, which has both cores for each of its steps."""
    figures: Figures = {}
    whole.against_trl(figures, "overlap", _one_thread_each(folder, arguments, 1).start(), ROUNDS, 2)
    return figures


def on_slurm(repeats: int, folder: Path, arguments: argparse.Namespace) -> Figures:
    """rollout.lag: 1 against none in one SLURM job of two nodes (`rloo submit --nodes 2`), in turns, from the end of
    round 1 on. Needs a SLURM, such as that of `make cluster-up`.
    """
    if not whole.slurm_runs("overlap_slurm"):
        return {}

    def run(project: whole.Project, _: int, __: Figures) -> float:
        project.on_slurm(LARGE, ROUNDS, 2)
        return sum(project.seconds(ROUNDS))

    return _with_and_without("overlap_slurm", repeats, folder, arguments, run)


def _with_and_without(
    part: str,
    repeats: int,
    folder: Path,
    arguments: argparse.Namespace,
    run: Callable[[whole.Project, int, Figures], float],
) -> Figures:
    """Runs without a lag and with one, in turns; `run` returns the seconds of one."""
    started = _one_thread_each(folder, arguments, 0).start()
    figures: Figures = {}
    for number in range(repeats):
        projects = (
            _one_thread_each(folder, arguments, lag, started.copy(folder / f"{number}-{lag}")) for lag in (0, 1)
        )
        without, lagging = (run(project, lag, figures) for lag, project in enumerate(projects))
        whole.add(figures, f"{part}_time_vs_in_turns", [without / lagging])
        print(f"bench: {part}: lag 0 {without:.1f} s, lag 1 {lagging:.1f} s", file=sys.stderr, flush=True)
    return figures


def _one_thread_each(
    folder: Path, arguments: argparse.Namespace, lag: int, project: whole.Project | None = None
) -> whole.Project:
    """The larger shape with a thread for each side and some lag; with `project` if it exists already."""
    changes = folder / f"lag-{lag}.yaml"
    threads = {"vllm": {"threads": 1}, "deepspeed": {"threads": 1}}
    changes.write_text(json.dumps({**threads, "rounds": ROUNDS, "rollout": {"lag": lag}}))  # YAML, too
    configuration = ("--configfile", LARGE, str(changes), *(("--config", *arguments.large) if arguments.large else ()))
    if project is None:
        return whole.Project(folder / "overlap", "bench", *configuration)
    project.configuration = configuration
    return project
