"""Resets of environments, which begin episodes; a prompt ends with the observation that its `reset` returns.

`reset` is seeded by its row, so all episodes of a prompt begin alike, in every round and in every stage.
"""

from collections.abc import Sequence
from typing import Any

from rloo_pipeline.artifacts.prompt_set import OBSERVATION
from rloo_pipeline.config import Rollout
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import gpu_claims
from rloo_pipeline.seeds import derive
from rloo_pipeline.user_code.confinement import Confinement
from rloo_pipeline.user_code.episode_process import Answer
from rloo_pipeline.user_code.pool import EnvironmentPool

OWN = ("prompt_id", "prompt_ids", OBSERVATION)
"""The package's own columns of prompt sets, which `reset` does not get."""
POLL_SECONDS = 1.0
"""Seconds to wait for an answer before looking for dead processes."""


def pool_of(settings: Rollout) -> EnvironmentPool:
    """The processes for tools and environments of a configuration; a context manager.

    Raises:
        UserError: the processes cannot run in the configured sandbox or image.
    """
    where = Confinement(
        settings.environment_sandbox,
        settings.environment_memory_mb,
        settings.environment_image or "",
        tuple(settings.environment_read_only),
        gpu_claims.names_set_aside(settings.environment_gpus),
        settings.environment_python or "",
    )
    return EnvironmentPool(
        settings.environment, settings.tools, settings.environment_workers, settings.environment_timeout, where
    )


def reset(pool: EnvironmentPool, episode: int, row: dict[str, Any]) -> None:
    """Sends a `reset` for an episode; it gets the prompt without its observation, as in TRL."""
    columns = {name: value for name, value in row.items() if name not in OWN}
    if text := row.get(OBSERVATION):
        last = columns["prompt"][-1]
        columns["prompt"] = [*columns["prompt"][:-1], {**last, "content": last["content"].removesuffix(text)}]
    pool.reset(episode, columns, derive(0, "environment", row["prompt_id"]))


def observation(answer: Answer, prompt_id: str) -> str:
    """The observation that a `reset` returned; empty if it returned None.

    Raises:
        UserError: the reset failed.
    """
    text = "".join(answer.texts)
    if any(answer.errors) or answer.lost:
        raise UserError(f"rollout.environment: reset failed for prompt {prompt_id}: {answer.lost or text}")
    return text


def observations(pool: EnvironmentPool, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The observation of each row; ends these episodes, so that the pool can play others.

    Args:
        pool: the processes.
        rows: rows with all columns and a prompt_id.

    Raises:
        UserError: a reset failed.
    """
    texts: dict[int, str] = {}
    for episode, row in enumerate(rows):
        reset(pool, episode, row)
    while pool.waiting:
        for answer in pool.ready(POLL_SECONDS):
            if answer.request == "reset":
                texts[answer.episode] = observation(answer, rows[answer.episode]["prompt_id"])
                pool.finish(answer.episode)
    return [texts[episode] for episode in range(len(rows))]
