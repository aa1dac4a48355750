"""update: a round's completions, scores and reference log-probs → the next policy, trainer state and metrics.

The mathematics is in `algorithm/`; `training/batch.py` (rewards → advantages over the whole round) and
`training/objective.py` (loss) apply it. `training/round_training.py` is the loop: for each of num_iterations passes,
the groups of the round are shuffled by seed and split into steps_per_generation optimizer steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rloo_pipeline.artifacts import files, policy, tables
from rloo_pipeline.config import Config
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.seeds import derive
from rloo_pipeline.trackers.events import write_events
from rloo_pipeline.training import round_data, round_training
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.metrics import Metrics, sample_metrics, update_metrics
from rloo_pipeline.training.round_data import Inputs
from rloo_pipeline.training.round_training import Trained, knows_ratio
from rloo_pipeline.training.settings import Settings
from rloo_pipeline.workers import engine_cache

if TYPE_CHECKING:
    from rloo_pipeline.training.batch import Carried


class UpdateOutputs(NamedTuple):
    """Files and folders that an update writes."""

    policy: Path
    trainer: Path
    metrics: Path
    events: Path
    table: Path


def update(
    config: Config, round_: int, start: Path, trainer: Path | None, inputs: Inputs, outputs: UpdateOutputs
) -> None:
    """Trains policy `round_` from policy `round_ - 1`.

    Args:
        config: of the stage.
        round_: number of the round, from 1.
        start: policy `round_ - 1`.
        trainer: trainer state of that policy; None in round 1.
        inputs: tables of the round.
        outputs: what to write.

    Raises:
        UserError: an input is damaged, the tables do not belong together, or the state is not of the policy in `start`.
    """
    import torch

    torch.set_num_threads(config.deepspeed.threads)
    sampled = round_data.read(config, inputs)
    engine, carried = _engine(config, round_, start, trainer)
    trained = round_training.train(config, round_, engine, carried, sampled)
    policy_digest = engine.save_policy(outputs.policy)
    engine.save_state(outputs.trainer, trained.carried.to_json(), round=round_, policy=policy_digest)
    if engine.rank.first:
        metrics = sample_metrics(sampled.rolled, sampled.scored, config.rollout.num_generations)
        metrics |= update_metrics(trained.batch, trained.record, config.algorithm, knows_ratio(config.algorithm))
        metrics |= _step_metrics(engine, trained) | {"round": round_, "num_tokens": trained.carried.num_tokens}
        _write(config, round_, trained, metrics, outputs, policy_digest)
        say(
            f"round {round_}: reward {metrics['reward']}, grad norm {_shown(metrics['grad_norm'])}, "
            f"{metrics['step']} optimizer steps so far, trained in {trained.seconds:.2f} s"
        )
    if not engine_cache.keep("trainer", _state_of(config, round_, policy_digest, outputs.trainer), engine):
        engine.close()


def _engine(config: Config, round_: int, start: Path, trainer: Path | None) -> tuple[Engine, Carried]:
    """The trainer as the previous round left it: the one that this worker keeps, or one loaded from its files."""
    from rloo_pipeline.training.batch import Carried

    seed = derive(config.seed, "update", round_)
    if trainer is None:
        return Engine(start, Settings.of_update(config), seed), Carried()
    digest = policy.digest(start)
    engine: Engine | None = engine_cache.take("trainer", _state_of(config, round_ - 1, digest, trainer))
    if engine is not None:
        engine.enter_gpu()
        engine.folder = start
        return engine, Carried.from_json(engine.carried(trainer))
    engine = Engine(start, Settings.of_update(config), seed)
    return engine, Carried.from_json(engine.load_state(trainer, round=round_ - 1, policy=digest))


def _state_of(config: Config, round_: int, digest: str, trainer: Path) -> tuple[object, ...]:
    """Key of a kept trainer, equal only if it has the state in these files: the manifest has a digest of each file."""
    return Settings.of_update(config), config.deepspeed, round_, digest, files.folder_digest(trainer)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _step_metrics(engine: Engine, trained: Trained) -> Metrics:
    """Loss and gradient norm as means over the round's optimizer steps; null where there was no step."""
    steps = trained.steps
    return {
        "step": engine.step_count,
        "steps_left_out": trained.left_out,
        "loss": sum(loss for loss, _ in steps) / len(steps) if steps else None,
        "grad_norm": sum(norm for _, norm in steps) / len(steps) if steps else None,
        "learning_rate": engine.settings.schedule.rate(engine.step_count - 1),
    }


def _write(
    config: Config, round_: int, trained: Trained, metrics: Metrics, outputs: UpdateOutputs, policy_digest: str
) -> None:
    """Writes train.parquet, metrics.json and the same metrics as TensorBoard events."""
    table = round_data.train_table(
        trained.rolled, trained.batch, trained.record, ratio_known=metrics["ratio/mean"] is not None
    )
    about = {"run": config.run, "round": round_, "seed": config.seed, "policy": policy_digest}
    tables.write(outputs.table, table, tables.TRAIN, "train", **about)
    files.write_json(outputs.metrics, metrics)
    write_events(outputs.events, round_, metrics)
