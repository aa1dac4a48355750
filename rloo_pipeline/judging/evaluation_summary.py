"""The summary of an evaluation: accuracy, pass@k, rewards and lengths of its completions, with 95% intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline.checks.statistics import estimate_scores, estimate_share, pass_at_ks
from rloo_pipeline.config import Config
from rloo_pipeline.judging.completions import is_correct, score_names, scores_of
from rloo_pipeline.seeds import derive
from rloo_pipeline.training.lengths import length_metrics


def summarize_evaluation(
    config: Config, table: pa.Table, samples: int | None = None, temperature: float | None = None
) -> dict[str, Any]:
    """Accuracy, pass@k, rewards, lengths and breakdown of an evaluation's completions.

    Args:
        config: the stage's configuration.
        table: completions with scores.
        samples: completions per prompt; by default as configured.
        temperature: sampling temperature; by default as configured.
    """
    settings = config.evaluation
    samples = samples or settings.num_generations
    temperature = settings.temperature if temperature is None else temperature
    seed = derive(config.seed, "bootstrap")
    right = is_correct(config, table, samples)
    passes = {k: estimate_share(values, samples // k) for k, values in pass_at_ks(right).items()}
    rewards = {name: scores_of(table, name, samples) for name in score_names(config.rewards)}
    means = {name: estimate_scores(values, settings.bootstrap_samples, seed) for name, values in rewards.items()}
    return {
        "prompts": len(right),
        "num_generations": samples,
        "temperature": temperature,
        "accuracy": passes[1].value,
        "ci95": passes[1].ci95,
        "pass@k": {str(k): estimate._asdict() for k, estimate in passes.items()},
        "rewards": {name: estimate and estimate._asdict() for name, estimate in means.items()},
        "breakdown": {name: _breakdown(right, rewards[name] >= 1.0) for name in settings.breakdown},
        **length_metrics(table),
    }


def _breakdown(right: NDArray[np.bool_], has: NDArray[np.bool_]) -> dict[str, float | None]:
    """Share of completions with a property, and accuracy of those with and without it."""
    return {
        "share": float(has.mean()),
        "accuracy_with": float(right[has].mean()) if has.any() else None,
        "accuracy_without": float(right[~has].mean()) if (~has).any() else None,
    }
