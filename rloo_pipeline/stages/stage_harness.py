"""stage-harness: downloads the data of lm-eval's tasks into the cache of `datasets` → tasks.json."""

import os
from pathlib import Path

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config import Config
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.stages.harness import load_tasks


def stage_harness(config: Config, output: Path) -> None:
    """Loads every task once, which downloads its data, and writes the tasks' names.

    Args:
        config: the stage's configuration.
        output: tasks.json.

    Raises:
        UserError: lm-eval does not know a task, or its data cannot be fetched, or it cannot be run with thinking.
    """
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # the libraries read them on import
        os.environ[name] = os.environ.get("RLOO_ASSETS_OFFLINE", "0")
    tasks = sorted(load_tasks(config)[1])
    write_json(output, {"tasks": tasks})
    say(f"the data of {', '.join(tasks)} has been downloaded")
