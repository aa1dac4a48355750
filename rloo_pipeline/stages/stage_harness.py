"""stage-harness: data of lm-eval's tasks → the cache of `datasets`, where there is internet → tasks.json."""

from __future__ import annotations

import os
from pathlib import Path

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config import Config
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.stages.harness import load_tasks, section_of


def stage_harness(config: Config, output: Path) -> None:
    """Loads every task once and writes their names.

    Raises:
        UserError: lm-eval does not know a task, or its data cannot be fetched.
    """
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # read when the libraries are imported
        os.environ[name] = os.environ.get("RLOO_ASSETS_OFFLINE", "0")
    tasks = sorted(load_tasks(section_of(config)))
    write_json(output, {"tasks": tasks})
    say(f"data of {', '.join(tasks)} is in place")
