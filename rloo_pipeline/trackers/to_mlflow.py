"""Writes a run's metrics to MLflow: to the store that MLFLOW_TRACKING_URI names, or else to an SQLite file in
results/<run>/mlflow/.

A tag with its id identifies the run. If the store already holds its first rounds, later rounds are appended; otherwise
the run is deleted and written again. A run whose writer was killed is also written again, because MLflow keeps points
that are sent twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.config.section import flatten
from rloo_pipeline.trackers.names import in_mlflow
from rloo_pipeline.trackers.trackers import PROJECT, History, Point

if TYPE_CHECKING:
    from mlflow import MlflowClient

ID, ROUNDS, DIGEST, WRITING = "rloo.id", "rloo.rounds", "rloo.digest", "rloo.writing"
MAX_VALUE_LENGTH = 6000
"""MLflow's limit of the length of a parameter's value in characters."""


def send(history: History, run: Path) -> str:
    """Writes the rounds of a history to the store, so that it holds exactly these rounds of the run.

    Returns:
        A sentence that says where to see them.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    from mlflow import MlflowClient

    own, tracking_uri = run / "mlflow", os.environ.get("MLFLOW_TRACKING_URI")
    if not tracking_uri:
        own.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri=tracking_uri or f"sqlite:///{own.absolute() / 'mlflow.db'}")
    experiment = _experiment(client, None if tracking_uri else (own / "artifacts").absolute().as_uri())
    run_id, done = _find_or_create(client, experiment, history)
    client.set_tag(run_id, WRITING, "true")
    _log(client, run_id, history.points[done:])
    client.set_tag(run_id, ROUNDS, len(history.points))
    client.set_tag(run_id, DIGEST, history.digest(len(history.points)))
    client.set_tag(run_id, WRITING, "false")
    if history.finished:
        client.set_terminated(run_id, end_time=_milliseconds(history.points[-1]))
    else:
        client.update_run(run_id, status="RUNNING")
    if tracking_uri:
        return "see them at MLFLOW_TRACKING_URI"
    return f"to see them: mlflow ui --backend-store-uri sqlite:///{own / 'mlflow.db'}"


def _experiment(client: MlflowClient, artifacts: str | None) -> str:
    """The experiment's id. Creates the experiment if it does not exist."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id if experiment else client.create_experiment(name, artifacts))


def _find_or_create(client: MlflowClient, experiment: str, history: History) -> tuple[str, int]:
    """The id of the run to write to, and the number of rounds that it already has."""
    stored_runs = client.search_runs([experiment], f"tags.`{ID}` = '{history.id}'")
    for run in stored_runs:
        tags, count = run.data.tags, int(run.data.tags.get(ROUNDS, 0))
        complete = tags.get(WRITING) == "false" and count <= len(history.points)
        if len(stored_runs) == 1 and complete and tags.get(DIGEST) == history.digest(count):
            return str(run.info.run_id), count
        client.delete_run(run.info.run_id)
    new = client.create_run(
        experiment, start_time=_milliseconds(history.points[0]), run_name=history.run, tags={ID: history.id}
    )
    _log_config(client, new.info.run_id, history.config)
    return str(new.info.run_id), 0


def _log(client: MlflowClient, run_id: str, points: Sequence[Point]) -> None:
    from mlflow.entities import Metric

    metrics = [
        Metric(_name(in_mlflow(name)), value, _milliseconds(point), step)
        for point in points
        for step, values in ((point.step, point.values), (point.held_out_step, point.held_out))
        for name, value in values.items()
    ]
    client.log_batch(run_id, metrics)


def _log_config(client: MlflowClient, run_id: str, config: Mapping[str, Any]) -> None:
    """Logs the configuration as parameters such as `algorithm.beta`."""
    from mlflow.entities import Param

    params = [Param(_name(name), str(value)[:MAX_VALUE_LENGTH]) for name, value in flatten(config).items()]
    client.log_batch(run_id, params=params)


def _name(name: str) -> str:
    """Replaces characters that MLflow does not allow in names."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]


def _milliseconds(point: Point) -> int:
    return int(1000 * point.time)
