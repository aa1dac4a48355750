"""A run's metrics as an offline run of Weights & Biases, in results/<run>/wandb/, for `wandb sync` to send.

W&B cannot go on with an offline run, so the folder is written whole each time and takes the place of the one before. It
asks nobody for anything.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from rloo_pipeline import runtime
from rloo_pipeline.files import new_folder
from rloo_pipeline.insight.trackers import PROJECT, History


def send(history: History, run: Path) -> str:
    """Writes the folder; earlier ones of this run go."""
    started = time.strftime("%Y%m%d_%H%M%S", time.gmtime(history.points[0].time))
    folder = run / "wandb" / f"offline-run-{started}-{history.id}"
    with new_folder(folder) as beside:
        scratch = beside / "scratch"
        scratch.mkdir()
        _write(history, scratch)
        [made] = (scratch / "wandb").glob("offline-run-*")
        for part in (made / f"run-{history.id}.wandb", made / "files"):
            shutil.move(part, beside / part.name)
        shutil.rmtree(scratch)
    for left in folder.parent.glob("offline-run-*"):
        if left != folder:
            shutil.rmtree(left)
    return f"to send it: wandb sync {folder}"


def _write(history: History, scratch: Path) -> None:
    """What W&B's own client writes, with nothing of the machine and no look around."""
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        os.environ.setdefault(name, str(runtime.cache_folder() / "wandb"))
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
        id=history.id,
        name=history.run,
        config=history.config,
        settings=settings,
    )
    for point in history.points:
        made.log({**point.values, "_timestamp": point.time}, step=point.round)
    made.finish()
    wandb.teardown()
