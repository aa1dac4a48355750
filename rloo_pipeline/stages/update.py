"""update: a round's completions, scores and reference log-probs → the next policy, trainer state and metrics.

`training/batch.py` (rewards → advantages over the whole round) and `training/objective.py` (loss) apply the mathematics
in `algorithm/`; `training/round_training.py` is the loop of optimizer steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from rloo_pipeline.artifacts import files, lineage, manifest, policy, round_tables, tables
from rloo_pipeline.artifacts.round_tables import RoundFiles, RoundTables
from rloo_pipeline.config import JSON, Config
from rloo_pipeline.planning import checkpointing
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.seeds import derive
from rloo_pipeline.trackers.events import write_events
from rloo_pipeline.training import round_data, round_training, trainer_state
from rloo_pipeline.training.batch import AlgorithmState
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.metrics import Metrics
from rloo_pipeline.training.rollout_proof import RolloutProof
from rloo_pipeline.training.round_metrics import round_metrics, summary
from rloo_pipeline.training.round_training import TrainedRound
from rloo_pipeline.training.settings import TrainerSettings
from rloo_pipeline.workers import engine_cache


class TrainingPolicies(NamedTuple):
    """Folders of policy `round_ - 1`, where the update starts, and of the policy that sampled (older with a lag)."""

    start: Path
    sampling: Path


class UpdateOutputs(NamedTuple):
    """Files and folders that an update writes."""

    policy: Path
    trainer: Path
    metrics: Path
    events: Path
    table: Path


def update(
    config: Config,
    round_: int,
    policies: TrainingPolicies,
    trainer: Path | None,
    inputs: RoundFiles,
    outputs: UpdateOutputs,
    prompts: Path | None = None,
    checks: Path | None = None,
) -> None:
    """Trains policy `round_` from policy `round_ - 1`.

    Args:
        config: the stage's configuration.
        round_: round number, from 1.
        policies: the policies that the update reads.
        trainer: trainer state of policy `round_ - 1`; None in round 1.
        inputs: the round's tables.
        outputs: files and folders to write.
        prompts: folder that the stage `prompts` wrote, for the images of a run that has any.
        checks: checks.json of the run; if given, proves that the policy sampled the rollouts.

    Raises:
        UserError: an input is damaged, or tables, log-probs or trainer state belong to another round or policy.
    """
    torch.set_num_threads(config.deepspeed.threads)
    config = checkpointing.resolve(config, policy.base_of(policies.start))
    digest = policy.digest(policies.start)
    sampled = _sampled(config, round_, policies, digest, inputs)
    proof = None if checks is None else RolloutProof(config, round_, policies.sampling, checks, inputs.rollouts)
    if proof and policies.sampling != policies.start:
        proof.by_older_policy(sampled.rollouts, prompts)
    engine, state = _engine(config, round_, policies.start, digest, trainer)
    trained = round_training.train(config, round_, engine, state, sampled, prompts, proof)
    policy_digest = engine.save_policy(outputs.policy, **lineage.of_policy(config.seed, policies.start, digest))
    about = {"round": round_, "policy": policy_digest, "seed": config.seed}
    trainer_state.save(engine, outputs.trainer, trained.algorithm_state.to_json(), **about)
    if engine.rank.first:
        metrics = round_metrics(config, round_, engine, sampled, trained)
        about |= {"run": config.run, **lineage.of_metrics(metrics, inputs.scores[0])}
        _write(trained, metrics, outputs, about)
        write_events(outputs.events, round_, metrics)
        say(summary(metrics, trained.seconds))
    if not engine_cache.keep("trainer", _state_of(config, round_, policy_digest, outputs.trainer), engine):
        engine.close()


def _sampled(config: Config, round_: int, policies: TrainingPolicies, digest: str, inputs: RoundFiles) -> RoundTables:
    """The tables of the round, if the policy that sampled is the one that should have."""
    sampling_digest = digest if policies.sampling == policies.start else policy.digest(policies.sampling)
    inputs = inputs if config.uses_reference else inputs._replace(reference=())
    return round_tables.read(inputs, policy.vocabulary(policies.start), round=round_, policy=sampling_digest)


def _engine(
    config: Config, round_: int, start: Path, digest: str, trainer: Path | None
) -> tuple[Engine, AlgorithmState]:
    """The trainer as the previous round left it: the one that this worker keeps, or one loaded from its files."""
    seed = derive(config.seed, "update", round_)
    if trainer is None:
        return Engine(start, TrainerSettings.from_config(config), seed), AlgorithmState()
    engine: Engine | None = engine_cache.take("trainer", _state_of(config, round_ - 1, digest, trainer))
    if engine is not None:
        engine.enter_gpu()
        engine.folder = start
        return engine, AlgorithmState.from_json(trainer_state.algorithm_state(trainer))
    engine = Engine(start, TrainerSettings.from_config(config), seed)
    return engine, AlgorithmState.from_json(trainer_state.load(engine, trainer, round=round_ - 1, policy=digest))


def _state_of(config: Config, round_: int, digest: str, trainer: Path) -> tuple[object, ...]:
    """Key of a kept trainer, equal only if it has the state in these files: the manifest has a digest of each file."""
    return TrainerSettings.from_config(config), config.deepspeed, round_, digest, manifest.folder_digest(trainer)


def _write(trained: TrainedRound, metrics: Metrics, outputs: UpdateOutputs, about: JSON) -> None:
    """Writes train.parquet and metrics.json."""
    known = metrics["ratio/mean"] is not None
    table = round_data.train_table(trained.rollouts, trained.batch, trained.record, ratio_known=known)
    tables.write(outputs.table, table, tables.TRAIN, "train", **about)
    files.write_json(outputs.metrics, metrics)
