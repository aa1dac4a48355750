"""What a run has written so far, whether it is finished, stopped, in flight, or was killed: reads files and nothing
else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.config.loading import load
from rloo_pipeline.diagnosis.diagnosis import Symptom, diagnose, monitors_of
from rloo_pipeline.diagnosis.symptoms import Metrics
from rloo_pipeline.errors import UserError

NO_MEMORY = re.compile(
    r"^.*(?:out of memory|OutOfMemoryError|oom[-_ ]kill|Cannot allocate memory|No available memory for the cache|"
    r"MemoryError).*$",
    re.IGNORECASE | re.MULTILINE,
)
TAIL = 200_000
"""Bytes at a log's end in which such words are looked for."""


class RunFiles(NamedTuple):
    """A run as far as it is."""

    folder: Path
    config: Config
    rounds: list[Metrics]
    """metrics.json of the rounds that are done, from the first without a gap."""

    def evaluations(self) -> dict[int, JSON]:
        """summary.json of evaluated policies by the policy's number, with their distance.json under `distance`; the
        final one only where all rounds are done.
        """
        found = {}
        for file in sorted((self.folder / "evaluation").glob("*/summary.json")):
            name = file.parent.name
            if name.isdigit() or name == "warmstart":
                found[int(name) if name.isdigit() else 0] = _evaluation(file)
            elif name == "final" and len(self.rounds) == self.config.rounds:
                found[self.config.rounds] = _evaluation(file)
        return found

    def out_of_memory(self) -> dict[int, str]:
        """By round, the last line of a stage's log that says so; a round that has no metrics counts as the latest."""
        found = {}
        for file in sorted((self.folder / "logs").glob("*/[0-9]*.log")):
            if (number := int(file.stem[:5])) <= self.config.rounds and (said := _no_memory(file)):
                found[min(number, max(len(self.rounds), 1))] = f"{file.parent.name} of round {number}: {said}"
        return found

    def symptoms(self) -> list[Symptom]:
        """What is wrong, by all there is."""
        return diagnose(
            self.rounds,
            self.config.gates,
            monitors=monitors_of(self.config.rewards),
            evaluations=self.evaluations(),
            out_of_memory=self.out_of_memory(),
            planned=self.config.rounds,
        )


def read(folder: Path) -> RunFiles:
    """The run in a folder.

    Raises:
        UserError: there is none, or a file of it is damaged.
    """
    if not (folder / "config.yaml").exists():
        raise UserError(
            f"{folder}: not the folder of a run, since it has no config.yaml; name one such as results/demo"
        )
    config = load(folder / "config.yaml")
    return RunFiles(folder, config, metrics_until(folder, config.rounds))


def metrics_of(folder: Path, number: int) -> Path:
    """Where the metrics of a round lie."""
    return folder / "rounds" / f"{number:05d}" / "metrics.json"


def metrics_until(folder: Path, last: int) -> list[Metrics]:
    """metrics.json of rounds 1 to `last`, up to the first that is not there."""
    found: list[Metrics] = []
    for number in range(1, last + 1):
        file = metrics_of(folder, number)
        if not file.exists():
            break
        found.append(read_json(file))
    return found


def _evaluation(summary: Path) -> JSON:
    """An evaluation with its policy's distance from policy 0, where that was measured."""
    distance = summary.with_name("distance.json")
    return {**read_json(summary), "distance": read_json(distance) if distance.exists() else None}


def _no_memory(file: Path) -> str | None:
    """The last line at a log's end that speaks of memory running out, cut to what a table holds."""
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - TAIL))
        found = NO_MEMORY.findall(log.read().decode("utf-8", errors="replace"))
    return found[-1].strip()[-160:] if found else None
