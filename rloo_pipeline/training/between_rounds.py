"""The trainer between two rounds: the engine that a worker keeps, or one that is loaded from its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.artifacts import files
from rloo_pipeline.config import Config
from rloo_pipeline.seeds import derive
from rloo_pipeline.training import trainer_state
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.settings import TrainerSettings
from rloo_pipeline.workers import engine_cache

if TYPE_CHECKING:
    from rloo_pipeline.training.batch import AlgorithmState


def take(config: Config, round_: int, start: Path, digest: str, trainer: Path | None) -> tuple[Engine, AlgorithmState]:
    """The trainer as round `round_ - 1` left it.

    Args:
        config: of the stage.
        round_: number of the round that will be trained, from 1.
        start: policy `round_ - 1`.
        digest: of that policy.
        trainer: trainer state of that policy; None in round 1.

    Raises:
        UserError: the state is damaged, or not of that round and policy.
    """
    from rloo_pipeline.training.batch import AlgorithmState

    seed = derive(config.seed, "update", round_)
    if trainer is None:
        return Engine(start, TrainerSettings.from_config(config), seed), AlgorithmState()
    engine: Engine | None = engine_cache.take("trainer", _key(config, round_ - 1, digest, trainer))
    if engine is not None:
        engine.enter_gpu()
        engine.folder = start
        return engine, AlgorithmState.from_json(trainer_state.algorithm_state(trainer))
    engine = Engine(start, TrainerSettings.from_config(config), seed)
    return engine, AlgorithmState.from_json(trainer_state.load(engine, trainer, round=round_ - 1, policy=digest))


def keep(config: Config, round_: int, engine: Engine, digest: str, trainer: Path) -> None:
    """Keeps the trainer for round `round_ + 1`, or closes it outside a worker; `trainer` is its saved state."""
    if not engine_cache.keep("trainer", _key(config, round_, digest, trainer), engine):
        engine.close()


def _key(config: Config, round_: int, digest: str, trainer: Path) -> tuple[object, ...]:
    """Equal only if the engine has the state in these files: the manifest has a digest of each file."""
    return TrainerSettings.from_config(config), config.deepspeed, round_, digest, files.folder_digest(trainer)
