"""Collects a run's metrics for Weights & Biases and MLflow: metrics.json and held_out.json of each round, at the
optimizer steps of the policies that they describe.

Trackers hold copies, which can be made again from the run's files at any time; they are never an input of the run.
`History.id` identifies a run by its name and everything that decides its numbers. A run that is sent again thus stays
the same run in the tracker, and one with a different learning rate is a new one.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, get_args

import yaml

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.config.run_keys import TENSORBOARD, Tracker
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging.run_files import held_out_of, metrics_of, metrics_until
from rloo_pipeline.stages.table import ROWS
from rloo_pipeline.trackers.names import STEP, eval_metrics, named

PROJECT = "rloo_pipeline"
"""W&B project and MLflow experiment, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME is set."""


class Point(NamedTuple):
    """The metrics of a round."""

    round: int
    time: float
    """Time at which metrics.json was written, in seconds since 1970."""
    values: dict[str, float]
    """The metrics that are not null, under their names in TensorBoard and W&B."""
    held_out: dict[str, float]
    """Metrics of held-out completions; empty if they were not measured."""
    held_out_step: int
    """Optimizer steps of the policy that sampled them, which is an earlier one."""

    @property
    def step(self) -> int:
        """Optimizer steps of the run so far; the number of the round if its metrics lack them."""
        return int(self.values.get(STEP, self.round))


class History(NamedTuple):
    """The rounds of a run that are sent."""

    run: str
    id: str
    config: JSON
    points: list[Point]
    finished: bool

    def digest(self, count: int) -> str:
        """Digest of the first `count` rounds. If it equals the stored one, these rounds need not be sent again."""
        points = ((point.round, point.values, point.held_out, point.held_out_step) for point in self.points[:count])
        return hashlib.sha256(json.dumps([self.id, *points], sort_keys=True).encode()).hexdigest()


Send = Callable[[History, Path], str]
"""Makes a tracker hold exactly this history of the run. Returns a sentence that says where to see it."""
TRACKERS = [name for name in get_args(Tracker) if name != TENSORBOARD]
"""Names in `report_to`, each that of a library. The module `to_NAME` has the function `send` that uses it."""


def sender(name: str) -> Send:
    """The function `send` of a tracker's module."""
    send: Send = importlib.import_module(f"{__package__}.to_{name}").send
    return send


def require(names: Collection[str]) -> None:
    """Checks that the libraries of these trackers are installed, without importing them, and MLflow's store.

    Raises:
        UserError: a library is missing, or as for `require_store`.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"report_to: this environment has no {name}; run `make setup`, or remove {name} from the list"
            )
    require_store(names)


def require_store(names: Collection[str]) -> None:
    """Checks the store of MLflow if it is one of these trackers.

    Raises:
        UserError: MLFLOW_TRACKING_URI names a folder, where MLflow would write the metrics `kl` and `kl/sequence_mean`
            as a file and a folder of the same name.
    """
    store = os.environ.get("MLFLOW_TRACKING_URI", "")
    if "mlflow" in names and re.match(r"(?i:file:)|(?!databricks|uc$)[^:]+$", store):
        raise UserError(
            f"MLFLOW_TRACKING_URI: MLflow cannot keep a run's metrics in a folder ({store}); name a database, such "
            "as sqlite:////home/me/mlflow.db, or a server"
        )


def history_of(run: Path, config: Config, last: int) -> History:
    """The history of a run up to round `last`, or up to the first unfinished round.

    Raises:
        UserError: a file of the run is damaged.
    """
    points, steps = list[Point](), {0: 0}
    for metrics in metrics_until(run, last):
        number = int(metrics["round"] or 0)
        held_out, step = dict[str, float](), 0
        if (file := held_out_of(run, number)).exists() and (measured := read_json(file))["prompts"]:
            held_out, step = named(eval_metrics(measured), "eval"), steps[measured["policy"]]
        time = metrics_of(run, number).stat().st_mtime
        points.append(Point(number, time, named(metrics, "train"), held_out, step))
        steps[number] = points[-1].step
    written = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    return History(config.run, identity(config), written, points, len(points) == config.rounds)


def with_accuracy(run: Path, first: int, last: int) -> int:
    """The last round, from `first` to `last`, such that every round from `first` on has its held-out accuracy."""
    return next((number - 1 for number in range(first + 1, last + 1) if not held_out_of(run, number).exists()), last)


def identity(config: Config) -> str:
    """The run's name, and a digest of everything that decides its numbers."""
    rollout = config.rollout
    by_rules = {key: value for key, value in (("lag", rollout.lag), ("refill", rollout.refill)) if value}
    by_stages = {row.stage: config.params(row.stage) for row in ROWS if row.identifies}
    decides = json.dumps(by_stages | by_rules, sort_keys=True)
    return f"{config.run}-{hashlib.sha256(decides.encode()).hexdigest()[:8]}"
