"""Shows the training prompts that a run uses, and their difficulty for policy 0 (`dataset.select`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rloo_pipeline.artifacts import prompt_counts
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.data.prompts_of_round import kept_rows


def training_prompts(config: Config, run: Path) -> JSON | None:
    """The facts for summary.json and the page.

    Args:
        config: the section `report`.
        run: folder of the run.

    Returns:
        Keys `weights`, and where policy 0 was sampled for it also `prompts`, `kept`, `pass_rate` (the range or None),
        `num_generations`, `right`: how many prompts have a pass rate of 0, 1/K, … 1, and `unscored`: how many have
        none. None where the run selects nothing, or where policy 0 has not been sampled yet.

    Raises:
        UserError: a table is damaged.
    """
    select = config.dataset.select
    if select is None:
        return None
    if not config.measures_difficulty:
        return {"weights": select.weights}
    files = [run / "warmstart" / "difficulty" / f"{shard:03d}.parquet" for shard in range(config.rollout.shards)]
    if not all(file.exists() for file in files):
        return None
    counts = list(prompt_counts.read(files, 0).values())
    rates = [counted.pass_rate for counted in counts if counted.samples]
    right = np.bincount([round(rate * select.num_generations) for rate in rates], minlength=select.num_generations + 1)
    return {
        "weights": select.weights,
        "prompts": len(counts),
        "kept": len(counts) if select.pass_rate is None else len(kept_rows(counts, select.pass_rate)),
        "pass_rate": select.pass_rate,
        "num_generations": select.num_generations,
        "right": right.tolist(),
        "unscored": len(counts) - len(rates),
    }
