"""The summary of an evaluation: accuracy, pass@k, rewards and lengths of its completions, with 95% intervals."""

from typing import Any

import numpy as np
import pyarrow as pa

from rloo_pipeline.checks.statistics import RESAMPLES, estimate_scores, estimate_share, pass_at_ks
from rloo_pipeline.config import Config
from rloo_pipeline.judging.completions import is_correct, score_names, scores_of
from rloo_pipeline.seeds import derive
from rloo_pipeline.training.lengths import length_metrics


def summarize_evaluation(
    config: Config, table: pa.Table, samples: int | None = None, temperature: float | None = None
) -> dict[str, Any]:
    """Accuracy, pass@k, rewards and lengths of an evaluation's completions. `unscored` is the number of those to which
    the deciding reward gave no score, which count as wrong.

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
    deciding = scores_of(table, config.deciding_reward.column, samples)
    passes = {k: estimate_share(values, samples // k) for k, values in pass_at_ks(right).items()}
    rewards = {
        name: estimate_scores(scores_of(table, name, samples), RESAMPLES, seed) for name in score_names(config.rewards)
    }
    return {
        "prompts": len(right),
        "num_generations": samples,
        "temperature": temperature,
        "accuracy": passes[1].value,
        "ci95": passes[1].ci95,
        "unscored": int(np.isnan(deciding).sum()),
        "pass@k": {str(k): estimate._asdict() for k, estimate in passes.items()},
        "rewards": {name: estimate and estimate._asdict() for name, estimate in rewards.items()},
        **length_metrics(table),
    }
