"""The trainer between two updates, kept in the memory of a warm worker."""

from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.training.retraining import RoundTrainer, facts_of_round
from rloo_pipeline.training.settings import TrainerSettings
from rloo_pipeline.training.trainer_state import TrainerState
from rloo_pipeline.workers import engine_cache


def take(config: Config, round_: int, policy: Policy, states: Path) -> RoundTrainer | None:
    """The trainer as a round left it, if this process has kept it.

    Args:
        config: the stage's configuration.
        round_: number of the round; 0 for a new trainer.
        policy: the policy after that round.
        states: folder with the run's trainer states.
    """
    key = _key(config, round_, policy.digest, _table(states, round_))
    kept: RoundTrainer | None = engine_cache.take("trainer", key) if round_ else None
    if kept is not None:
        kept.engine.enter_gpu()
        kept.engine.policy = policy
    return kept


def put(config: Config, trainer: RoundTrainer, policy: Path, states: Path, about: dict[str, Any]) -> None:
    """Keeps the trainer if this process is a worker, which writes its state later; otherwise writes it now and closes
    it.

    After the last round the state is always written at once; the report removes the one before it.

    Args:
        config: the stage's configuration.
        trainer: the trainer after a round.
        policy: the round's policy.
        states: folder with the run's trainer states.
        about: facts for the state's manifest, at least the round and the policy's digest.
    """
    engine, round_ = trainer.engine, about["round"]
    about = about | {"table": engine.from_first(_table(states, round_))}  # only the first rank has written it
    state = TrainerState(engine, trainer.algorithm_state.to_json(), policy, **about)
    state.lag = config.rollout.lag if config.node_folder else 0
    target = states / f"{round_:05d}"
    key = _key(config, round_, about["policy"], about["table"])
    kept = engine.can_wait and engine_cache.keep("trainer", key, trainer)
    if kept and round_ < config.rounds:
        engine_cache.write_later(state.write, target)
        return
    state.lag = max(state.lag, 1)  # this round may have to run again
    state.write(target)
    if not kept:
        engine.close()


def _key(config: Config, round_: int, policy: str, table: str | None) -> tuple[object, ...]:
    """Key of a kept trainer, with the digests of the policy and of train.parquet that its update wrote."""
    return TrainerSettings.from_config(config), config.model, round_, policy, table


def _table(states: Path, round_: int) -> str | None:
    """Digest of train.parquet of a round."""
    return facts_of_round(states.parent, round_).get(tables.DIGEST)
