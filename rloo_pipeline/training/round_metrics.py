"""metrics.json of a round: what `metrics` computes of samples and steps, and what the engine knows."""

from __future__ import annotations

from rloo_pipeline.artifacts.round_tables import RoundTables
from rloo_pipeline.config import Config
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.metrics import (
    OF_ENGINES,
    Metrics,
    group_metrics,
    sample_metrics,
    staleness,
    update_metrics,
)
from rloo_pipeline.training.round_training import TrainedRound, measures_ratio
from rloo_pipeline.training.selection import teaching_groups


def round_metrics(config: Config, round_: int, engine: Engine, sampled: RoundTables, trained: TrainedRound) -> Metrics:
    """The metrics of a round.

    Args:
        config: the stage's configuration.
        round_: number of the round, from 1.
        engine: the trainer after the round.
        sampled: all completions of the round.
        trained: result of the training.
    """
    metrics = sample_metrics(sampled.rollouts, sampled.scores, config.rollout.num_generations)
    metrics |= update_metrics(trained.batch, trained.record, config.algorithm, measures_ratio(config.algorithm))
    if config.rollout.masked_by:
        metrics |= {f"sampling/{name}": None for name in OF_ENGINES}
    metrics |= group_metrics(
        teaching_groups(config.algorithm, config.rollout.num_generations, sampled),
        sampled,
        len(trained.rollouts) // config.rollout.num_generations,
    )
    metrics["sampling/staleness"] = staleness(sampled.rollouts, round_)
    metrics |= trained.experts | _step_metrics(engine, trained)
    return metrics | {"round": round_, "num_tokens": trained.algorithm_state.num_tokens}


def summary(metrics: Metrics, seconds: float) -> str:
    """Log line for a round that was trained in `seconds`."""
    reward, norm = ("–" if metrics[key] is None else f"{metrics[key]:.3g}" for key in ("reward", "grad_norm"))
    return (
        f"round {metrics['round']}: reward {reward}, grad norm {norm}, {metrics['step']} optimizer steps so far, "
        f"trained in {seconds:.2f} s"
    )


def _step_metrics(engine: Engine, trained: TrainedRound) -> Metrics:
    """Loss and gradient norm as means over the round's optimizer steps; null where there was no step."""
    steps = trained.steps
    return {
        "step": engine.step_count,
        "steps_left_out": trained.skipped_steps,
        "loss": sum(loss for loss, _ in steps) / len(steps) if steps else None,
        "grad_norm": sum(norm for _, norm in steps) / len(steps) if steps else None,
        "learning_rate": engine.settings.learning_rate.at_step(engine.step_count - 1),
    }
