"""A run's metrics in MLflow: the store that MLFLOW_TRACKING_URI names, else an SQLite file in results/<run>/mlflow/.

The run is found by a tag with its id. What is there is gone on with, where it is the first rounds of what is to be
there; else it is deleted and written anew. So is a run whose writer was killed, since MLflow would keep a point twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.trackers.trackers import PROJECT, History, Point

if TYPE_CHECKING:
    from mlflow import MlflowClient

ID, ROUNDS, DIGEST, WRITING = "rloo.id", "rloo.rounds", "rloo.digest", "rloo.writing"
AT_ONCE, PARAMS_AT_ONCE, LONGEST = 1000, 100, 6000
"""What MLflow takes in one call, and of a parameter's value."""


def send(history: History, run: Path) -> str:
    """Has the store hold these rounds."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    from mlflow import MlflowClient

    own, named = run / "mlflow", os.environ.get("MLFLOW_TRACKING_URI")
    if not named:
        own.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri=named or f"sqlite:///{own.absolute() / 'mlflow.db'}")
    experiment = _experiment(client, None if named else (own / "artifacts").absolute().as_uri())
    run_id, done = _begun(client, experiment, history)
    client.set_tag(run_id, WRITING, "true")
    _log(client, run_id, history.points[done:])
    client.set_tag(run_id, ROUNDS, len(history.points))
    client.set_tag(run_id, DIGEST, history.digest(len(history.points)))
    client.set_tag(run_id, WRITING, "false")
    if history.finished:
        client.set_terminated(run_id, end_time=_milliseconds(history.points[-1]))
    else:
        client.update_run(run_id, status="RUNNING")
    if named:
        return "they are where MLFLOW_TRACKING_URI says"
    return f"to see them: mlflow ui --backend-store-uri sqlite:///{own / 'mlflow.db'}"


def _experiment(client: MlflowClient, artifacts: str | None) -> str:
    """The experiment, made where it is not there."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name, artifact_location=artifacts))


def _begun(client: MlflowClient, experiment: str, history: History) -> tuple[str, int]:
    """The run to write to, and how many rounds it has."""
    found = client.search_runs([experiment], f"tags.`{ID}` = '{history.id}'")
    for run in found:
        tags, count = run.data.tags, int(run.data.tags.get(ROUNDS, 0))
        whole = tags.get(WRITING) == "false" and count <= len(history.points)
        if len(found) == 1 and whole and tags.get(DIGEST) == history.digest(count):
            return str(run.info.run_id), count
        client.delete_run(run.info.run_id)
    made = client.create_run(
        experiment, start_time=_milliseconds(history.points[0]), run_name=history.run, tags={ID: history.id}
    )
    _describe(client, made.info.run_id, history.config)
    return str(made.info.run_id), 0


def _log(client: MlflowClient, run_id: str, points: Sequence[Point]) -> None:
    from mlflow.entities import Metric

    metrics = [
        Metric(_name(name), value, _milliseconds(point), point.round)
        for point in points
        for name, value in point.values.items()
    ]
    for place in range(0, len(metrics), AT_ONCE):
        client.log_batch(run_id, metrics=metrics[place : place + AT_ONCE])


def _describe(client: MlflowClient, run_id: str, config: Mapping[str, Any]) -> None:
    """The configuration as parameters, `algorithm.beta` and the like."""
    from mlflow.entities import Param

    params = [Param(_name(name), str(value)[:LONGEST]) for name, value in _flat(config).items()]
    for place in range(0, len(params), PARAMS_AT_ONCE):
        client.log_batch(run_id, params=params[place : place + PARAMS_AT_ONCE])


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Sections within sections as names with dots."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        inside = isinstance(value, Mapping) and value
        found |= _flat(value, f"{before}{name}.") if inside else {f"{before}{name}": value}
    return found


def _name(name: str) -> str:
    """With what MLflow allows in a name."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]


def _milliseconds(point: Point) -> int:
    return int(1000 * point.time)
