"""What a run has written so far, read from its folder: finished, stopped, in flight or killed. Writes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.artifacts.files import read_artifact
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.config.loading import load
from rloo_pipeline.diagnosis.diagnosis import Symptom, diagnose, monitors_of
from rloo_pipeline.diagnosis.history import Metrics
from rloo_pipeline.errors import UserError

NO_MEMORY = re.compile(
    r"^.*(?:out of memory|OutOfMemoryError|oom[-_ ]kill|Cannot allocate memory|No available memory for the cache|"
    r"MemoryError).*$",
    re.IGNORECASE | re.MULTILINE,
)
TAIL = 200_000
"""Bytes at a log's end that are searched for `NO_MEMORY`."""
EVIDENCE_LENGTH = 160
"""Characters of such a line that are shown."""


class RunFiles(NamedTuple):
    """A run, as far as it has come."""

    folder: Path
    config: Config
    rounds: list[Metrics]
    """metrics.json of the finished rounds, from the first without a gap."""

    def evaluations(self) -> dict[int, JSON]:
        """The evaluations by the policy's number; `final` only when all rounds are finished."""
        numbers = {"warmstart": 0}
        if len(self.rounds) == self.config.rounds:
            numbers["final"] = self.config.rounds
        evaluations = {}
        for file in sorted((self.folder / "evaluation").glob("*/summary.json")):
            name = file.parent.name
            number = int(name) if name.isdigit() else numbers.get(name)
            if number is not None:
                evaluations[number] = read_evaluation(self.folder, name)
        return evaluations

    def accuracies(self) -> dict[int, float]:
        """Held-out accuracy by the policy's number: of its evaluation, else on the problems of each round."""
        rounds = {
            measured["policy"]: measured["accuracy"] for measured in held_out_until(self.folder, len(self.rounds) + 1)
        }
        return rounds | {number: evaluation["accuracy"] for number, evaluation in self.evaluations().items()}

    def out_of_memory(self) -> dict[int, str]:
        """By round, the last out-of-memory line in a log of its stages; an unfinished round counts as the latest."""
        lines = {}
        for file in sorted((self.folder / "logs").glob("*/[0-9]*.log")):
            number = int(file.stem[:5])
            if file.exists() and number <= self.config.rounds and (line := _no_memory(file)):
                lines[min(number, max(len(self.rounds), 1))] = f"{file.parent.name} of round {number}: {line}"
        return lines

    def symptoms(self) -> list[Symptom]:
        """The symptoms of the run, from metrics, evaluations and logs."""
        return diagnose(
            self.rounds,
            self.config.gates,
            monitors=monitors_of(self.config.rewards),
            evaluations=self.evaluations(),
            out_of_memory=self.out_of_memory(),
            planned=self.config.rounds,
        )


def read(folder: Path) -> RunFiles:
    """Reads the run in a folder.

    Raises:
        UserError: the folder has no run, or a file of it is damaged.
    """
    config = read_config(folder)
    return RunFiles(folder, config, metrics_until(folder, config.rounds))


def read_config(folder: Path) -> Config:
    """Reads the configuration of the run in a folder.

    Raises:
        UserError: the folder has no config.yaml, or it is not valid.
    """
    file = folder / "config.yaml"
    if not file.exists() and (folder / "experiment.yaml").exists():
        runs = sorted(str(file.parent) for file in folder.glob("*/[0-9]*/config.yaml"))
        example = f", such as {runs[0]}" if runs else ""
        raise UserError(f"{folder}: the folder of an experiment; name one of its runs{example}")
    if not file.exists():
        raise UserError(
            f"{folder}: not the folder of a run, since it has no config.yaml; name one such as results/demo"
        )
    return load(file)


def metrics_of(folder: Path, number: int) -> Path:
    """The path of a round's metrics.json."""
    return folder / "rounds" / f"{number:05d}" / "metrics.json"


def read_metrics(folder: Path, number: int) -> JSON:
    """metrics.json of a round.

    Raises:
        UserError: it is missing, damaged, or of another round.
    """
    return read_artifact(metrics_of(folder, number), round=number)


def metrics_until(folder: Path, last: int) -> list[Metrics]:
    """metrics.json of rounds 1 to `last`, up to the first round that has none."""
    rounds: list[Metrics] = []
    for number in range(1, last + 1):
        file = metrics_of(folder, number)
        if not file.exists():
            break
        rounds.append(read_metrics(folder, number))
    return rounds


def held_out_of(folder: Path, number: int) -> Path:
    """The path of a round's held_out.json."""
    return metrics_of(folder, number).with_name("held_out.json")


def held_out_until(run: Path, last: int) -> list[JSON]:
    """held_out.json of rounds 1 to `last`, those that have one: accuracy of the policies that sampled them."""
    files = (held_out_of(run, number) for number in range(1, last + 1))
    measured = [read_artifact(file) for file in files if file.exists()]
    return [summary for summary in measured if summary["accuracy"] is not None]


def read_evaluation(run: Path, name: str) -> JSON:
    """summary.json of an evaluation, with its `distance` (KL from policy 0) and `harness` (lm-eval), each or None."""
    folder = run / "evaluation" / name
    evaluation: JSON = read_artifact(folder / "summary.json", evaluated=name)
    for part in ("distance", "harness"):
        file = folder / f"{part}.json"
        evaluation[part] = read_artifact(file, policy=evaluation["policy"]) if file.exists() else None
    return evaluation


def _no_memory(log: Path) -> str | None:
    """The last line near a log's end that reports a lack of memory."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = NO_MEMORY.findall(file.read().decode("utf-8", errors="replace"))
    return lines[-1].strip()[-EVIDENCE_LENGTH:] if lines else None
