"""The metrics of a run's rounds as Weights & Biases and MLflow take them: the numbers of metrics.json, a step a round.

Nothing here is an input of the run, and no byte of it is compared: these places are copies, to be made again from the
run's files at any time. A run is known by its name and by all that decides its numbers (`History.id`), so that the same
run is the same one there however often it is sent, and one with another learning rate is another one.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import yaml

from rloo_pipeline.config import JSON, Config
from rloo_pipeline.diagnosis.run_files import metrics_of, metrics_until
from rloo_pipeline.errors import UserError

PROJECT = "rloo_pipeline"
"""Project of W&B and experiment of MLflow, where WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME name no other."""
DECIDING = ("stage-assets", "prompts", "warmstart", "rollout", "score", "reference", "update")
"""Stages whose results the metrics come from."""


class Point(NamedTuple):
    """A round."""

    round: int
    time: float
    """When its metrics were written, in seconds since 1970."""
    values: dict[str, float]
    """Every metric that exists in it."""


class History(NamedTuple):
    """A run as far as it is told."""

    run: str
    id: str
    config: JSON
    points: list[Point]
    finished: bool

    def digest(self, count: int) -> str:
        """Of the numbers of the first rounds: equal where nothing is to be sent again."""
        told = [self.id, *((point.round, point.values) for point in self.points[:count])]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


Send = Callable[[History, Path], str]
"""Has a place hold the history and nothing else of this run; gives what to tell people of it."""
TRACKERS: dict[str, tuple[str, str]] = {
    "wandb": ("wandb", "rloo_pipeline.trackers.wandb_folder"),
    "mlflow": ("mlflow", "rloo_pipeline.trackers.mlflow_store"),
}
"""Name in `report_to`: the library, and the module here whose `send` uses it."""


def sender(name: str) -> Send:
    """The function that sends to a tracker."""
    found: Send = importlib.import_module(TRACKERS[name][1]).send
    return found


def require(names: Iterable[str]) -> None:
    """Looks whether the libraries are there, without importing them.

    Raises:
        UserError: one is not.
    """
    for name in names:
        library = TRACKERS[name][0]
        if importlib.util.find_spec(library) is None:
            raise UserError(
                f"report_to: this environment has no {library}; run `make setup`, or take {name} out of the list"
            )


def history_of(run: Path, config: Config, last: int) -> History:
    """The run up to round `last`, or up to the first round that is not done.

    Raises:
        UserError: a file of the run is damaged.
    """
    points = []
    for found in metrics_until(run, last):
        number = int(found["round"] or 0)
        values = {name: value for name, value in sorted(found.items()) if value is not None}
        points.append(Point(number, metrics_of(run, number).stat().st_mtime, values))
    written = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    return History(config.run, identity(config), written, points, len(points) == config.rounds)


def identity(config: Config) -> str:
    """The run's name, and a digest of what decides its numbers."""
    decides = json.dumps({stage: config.params(stage) for stage in DECIDING}, sort_keys=True)
    return f"{config.run}-{hashlib.sha256(decides.encode()).hexdigest()[:8]}"


def in_order_of_time(run: Path, first: int, last: int) -> int:
    """The last round up to `last` that was made after those before it, from `first` on.

    A round that is made again leaves older files behind it, of rounds that are to be made again too.
    """
    file, until = metrics_of(run, first), first
    while until < last and (behind := metrics_of(run, until + 1)).exists():
        if behind.stat().st_mtime < file.stat().st_mtime:
            break
        file, until = behind, until + 1
    return until
