"""A run's metrics as an offline run of Weights & Biases, in results/<run>/wandb/, for `wandb sync` to send.

`wandb sync` puts what it sends behind what the server has of a run, so no round may be in two folders that it sends.
The folder that it has not sent yet is written anew with every round that comes; what comes after one that it has sent
is a folder of its own. Where rounds were made again with other numbers, all begins anew, as another run.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.artifacts.files import atomic_folder, read_json, write_json
from rloo_pipeline.runtime import caches
from rloo_pipeline.trackers.trackers import PROJECT, History, Point

STATE = "rloo.json"
"""What the folders hold: the run's `id`, how often it was begun `again`, `rounds` and their `digest`, the round with
which the last folder begins (`first`) and that folder's name (`last`)."""


def send(history: History, run: Path) -> str:
    """Has the folders hold these rounds."""
    place = run / "wandb"
    state = read_json(place / STATE) if (place / STATE).exists() else None
    again, first = 0, 1
    if state and state["id"] == history.id:
        again, told = state["again"], state["rounds"]
        if told <= len(history.points) and state["digest"] == history.digest(told):
            first = told + 1 if list((place / state["last"]).glob("*.synced")) else state["first"]
        else:
            again += 1
    if first == 1:
        for left in place.glob("offline-run-*"):
            shutil.rmtree(left)
    if first <= len(history.points):
        name = history.id if not again else f"{history.id}-{again + 1}"
        folder = _folder(place, name, history, history.points[first - 1 :])
        found = {"id": history.id, "again": again, "rounds": len(history.points), "first": first, "last": folder.name}
        write_json(place / STATE, found | {"digest": history.digest(len(history.points))})
    return f"to send them: wandb sync {place}/offline-run-*"


def _folder(place: Path, name: str, history: History, points: Sequence[Point]) -> Path:
    """A folder with some rounds, in place of the one that began with the same."""
    began = time.strftime("%Y%m%d_%H%M%S", time.gmtime(points[0].time))
    folder = place / f"offline-run-{began}-{name}"
    with atomic_folder(folder) as beside:
        scratch = beside / "scratch"
        scratch.mkdir()
        _write(name, history, points, scratch)
        [made] = (scratch / "wandb").glob("offline-run-*")
        for part in (made / f"run-{name}.wandb", made / "files"):
            shutil.move(part, beside / part.name)
        shutil.rmtree(scratch)
    return folder


def _write(run_id: str, history: History, points: Sequence[Point], scratch: Path) -> None:
    """What W&B's own client writes, with nothing of the machine and no look around."""
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        os.environ.setdefault(name, str(caches.cache_folder() / "wandb"))
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    settings = wandb.Settings(
        mode="offline",
        root_dir=str(scratch),
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    made = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        entity=os.environ.get("WANDB_ENTITY"),
        id=run_id,
        name=history.run,
        config=history.config,
        settings=settings,
    )
    for point in points:
        made.log({**point.values, "_timestamp": point.time}, step=point.round)
    made.finish()
    wandb.teardown()
