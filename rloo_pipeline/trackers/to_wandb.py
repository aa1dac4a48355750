"""Writes a run's metrics as an offline run of Weights & Biases, in results/<run>/wandb/, for `wandb sync` to send.

`wandb sync` appends to the run on the server, so no round may be in two folders that are sent. A folder that has not
been sent yet is rewritten with every new round. Once it has been sent, later rounds go to a new folder. If rounds were
repeated with different numbers, or with a configuration that an earlier run had, everything starts over as a new run.
"""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.artifacts.files import atomic_folder, read_json, write_json
from rloo_pipeline.runtime import caches
from rloo_pipeline.trackers.names import STEP
from rloo_pipeline.trackers.trackers import PROJECT, History, Point

STATE = "rloo.json"
"""File that records what the folders hold: the run's `id`, how often it started over (`again`), `rounds` and their
`digest`, the first round in the last folder (`first`), that folder's name (`last`), and how often the runs of earlier
configurations started (`earlier`, by their ids).
"""


def send(history: History, run: Path) -> str:
    """Writes the rounds of a history to the folders.

    Returns:
        A sentence that says how to send them.
    """
    place = run / "wandb"
    state = read_json(place / STATE) if (place / STATE).exists() else None
    again, first = 0, 1
    earlier = state.get("earlier", {}) if state else {}
    if state and state["id"] != history.id:
        earlier[state["id"]] = state["again"] + 1
        again = earlier.get(history.id, 0)
    elif state:
        again, written = state["again"], state["rounds"]
        if written <= len(history.points) and state["digest"] == history.digest(written):
            first = written + 1 if list((place / state["last"]).glob("*.synced")) else state["first"]
        else:
            again += 1
    if first == 1:
        for old in place.glob("offline-run-*"):
            shutil.rmtree(old)
    if first <= len(history.points):
        name = history.id if not again else f"{history.id}-{again + 1}"
        folder = _folder(place, name, history, history.points[first - 1 :])
        state = {"id": history.id, "again": again, "rounds": len(history.points), "first": first, "last": folder.name}
        write_json(place / STATE, state | {"digest": history.digest(len(history.points)), "earlier": earlier})
    return f"to send them: wandb sync {place}/offline-run-*"


def _folder(place: Path, name: str, history: History, points: Sequence[Point]) -> Path:
    """Writes a folder with some rounds. Replaces a folder that began with the same round."""
    began = time.strftime("%Y%m%d_%H%M%S", time.gmtime(points[0].time))
    folder = place / f"offline-run-{began}-{name}"
    with atomic_folder(folder) as temporary:
        scratch = temporary / "scratch"
        scratch.mkdir()
        _write(name, history, points, scratch)
        [offline_run] = (scratch / "wandb").glob("offline-run-*")
        for part in (offline_run / f"run-{name}.wandb", offline_run / "files"):
            shutil.move(part, temporary / part.name)
        shutil.rmtree(scratch)
    return folder


def _write(run_id: str, history: History, points: Sequence[Point], scratch: Path) -> None:
    """Writes rounds with W&B's client, with all recording of machine, code and environment turned off."""
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
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        entity=os.environ.get("WANDB_ENTITY"),
        id=run_id,
        name=history.run,
        config=history.config,
        settings=settings,
    )
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP, step_sync=True)  # the x-axis of every chart, as transformers sets it
    for point in points:  # two rows per round, because W&B merges rows with the same step
        if point.held_out:
            held_out = {**point.held_out, STEP: point.held_out_step, "_timestamp": point.time}
            run.log(held_out, step=2 * point.round - 1)
        run.log({**point.values, "_timestamp": point.time}, step=2 * point.round)
    run.finish()
    wandb.teardown()
