"""Expected lengths of completions, from the tables of earlier rounds of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pyarrow.compute as pc

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.seeds import derive, earlier_rounds


def expected(config: Config, train: PromptSet, rows: Sequence[int], round_: int, rounds: Path) -> dict[str, float]:
    """Mean tokens of a prompt's completions when it was last sampled, by prompt_id, for the prompts that were.

    Only rounds that the sampling policy was trained on count, as others may be in flight. With `dataset.select` nothing
    is known, since it has no epochs.

    Args:
        config: configuration of the stage `rollout`.
        train: all training prompts.
        rows: rows of the prompts.
        round_: number of the round that samples, from 1.
        rounds: folder of the rounds.
    """
    if config.dataset.select is not None:
        return {}
    last, seed = config.rollout.policy_of(round_), derive(config.seed, "prompts")
    sampled = earlier_rounds(rows, len(train), config.rollout.sampled_prompts, last, seed)
    ids: list[str] = train.table["prompt_id"].to_pylist()
    by_round = defaultdict[int, set[str]](set)
    for row, number in sampled.items():
        by_round[number].add(ids[row])
    lengths = defaultdict[str, list[int]](list)
    for number, wanted in by_round.items():
        for file in sorted((rounds / f"{number:05d}" / "rollouts").glob("*.parquet")):
            table = tables.read(file, "rollouts", ["prompt_id", "completion_ids"])
            counts = pc.list_value_length(table["completion_ids"]).to_pylist()
            for prompt_id, count in zip(table["prompt_id"].to_pylist(), counts, strict=True):
                if prompt_id in wanted:
                    lengths[prompt_id].append(count)
    return {prompt_id: fmean(counts) for prompt_id, counts in lengths.items()}
