"""From the last gradient of an update to the next round's sampling, by Snakemake with warm engines: seconds by part.

The parts are read from logs and from the times of files. Rounds are short, and nothing is learned.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping
from pathlib import Path

import whole

CONFIGURATION = Path(__file__).with_name("handover.yaml").relative_to(whole.ROOT)
ROUNDS = 3


def handover(_: int, folder: Path, arguments: argparse.Namespace) -> Mapping[str, list[float]]:
    """From the last gradient to the next round's sampling, and where the time goes."""
    changes = ["--config", *arguments.large] if arguments.large else []
    project = whole.Project(folder / "handover", "bench", "--configfile", str(CONFIGURATION), "--notemp", *changes)
    project.start()
    project.snakemake(f"rounds/{ROUNDS:05d}/rollouts/000.parquet")
    figures: dict[str, list[float]] = {}
    for number in range(1, ROUNDS):
        for name, seconds in parts(project.run, number).items():
            whole.add(figures, f"handover_{name}seconds", [seconds])
    return figures


def parts(run: Path, number: int) -> Mapping[str, float]:
    """Seconds of the parts after the update of round `number`; the key "" is all of them."""
    update = (run / "logs" / "update" / f"{number:05d}.log").read_text()
    rollout = (run / "logs" / "rollout" / f"{number + 1:05d}-000.log").read_text()
    policy = run / "policies" / f"{number:05d}"
    trained = born(policy)  # the folder is made when the weights are to be written
    written = (policy / "manifest.json").stat().st_mtime
    ended, _ = whole.logged(update, r"rloo\.time: took ([\d.]+) s")
    rollout_ended, seconds = whole.logged(rollout, r"rloo\.time: took ([\d.]+) s")
    sampled, sampling = whole.logged(rollout, r"sampled in ([\d.]+) s")
    began = rollout_ended - seconds
    # the state, where it is written before the stage ends
    states = [file.stat().st_mtime for file in (run / "trainer" / policy.name).glob("state/*")]
    sealed = [file.stat().st_mtime for file in (run / "trainer" / policy.name).glob("manifest.json")]
    state = max([written, *(time for time in states if time < ended)])
    digested = max([state, *(time for time in sealed if time < ended)])
    return {
        "": sampled - sampling - trained,
        "policy_": written - trained,
        "state_": state - written,
        "digests_": digested - state,
        "stage_end_": ended - digested,
        "between_stages_": began - ended,
        "rollout_start_": sampled - sampling - began,
    }


def born(path: Path) -> float:
    """When a folder was made, in seconds since 1970."""
    return float(subprocess.run(["stat", "-c", "%.W", path], capture_output=True, text=True, check=True).stdout)
