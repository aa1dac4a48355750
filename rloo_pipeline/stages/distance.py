"""distance: the KL divergence of a policy from policy 0, on its own held-out completions → distance.json.

KL(π‖π₀) of a completion is estimated by Σ_t (log π − log π₀) over the tokens that π sampled. The estimate is unbiased
if both log-probs are at the sampling temperature. For greedy completions it is the log-ratio of the completion at
temperature 1, which is not a KL. If `rollout.generation_kwargs` masks tokens, the mean is over samples of the masked
policy, which is not a KL either. Both log-probs come from the trainer's model, so engines make no difference.

The trainer's log-probs under π also prove the evaluation: they must agree with the sampler's (`sampler_proof`). The
stage `evaluate` cannot do this, since the trainer's model may not fit beside the engine. `checks` proves policy 0.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.checks.statistics import RESAMPLES, estimate_mean
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import ranks
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.seeds import derive
from rloo_pipeline.training import forward_only, round_data, sampler_proof


def distance(
    config: Config,
    completions: Path,
    policy: Policy,
    start: Policy,
    output: Path,
    prompts: Path | None = None,
    checks: Path | None = None,
) -> None:
    """Writes the mean KL per completion, with a 95% interval over prompts, and the mean KL per token.

    Args:
        config: the stage's configuration.
        completions: table of an evaluation of the policy.
        policy: the policy.
        start: policy 0.
        output: distance.json.
        prompts: folder that the stage `prompts` wrote; only needed if prompts have images.
        checks: checks.json of the run; if given, proves that the policy sampled the completions.

    Raises:
        UserError: the log-probs show that another policy sampled the completions.
    """
    table = tables.read(completions, "completions", policy=policy.digest)
    settings = config.evaluation
    sequences = round_data.sequences_of(table, prompts, policy)
    temperature = settings.temperature or 1.0
    logps = forward_only.logps_of_completions(config, policy, temperature, sequences, "policy")
    if checks is not None:
        sampler_proof.require_evaluation(config, policy, table, logps, completions, checks)
    kl = _summed(logps)
    kl -= _summed(forward_only.logps_of_completions(config, start, temperature, sequences, "policy 0"))
    kl_by_prompt = kl.reshape(-1, settings.num_generations).mean(axis=1)
    estimate = estimate_mean(kl_by_prompt, RESAMPLES, derive(config.seed, "bootstrap"))
    summary = {
        "policy": policy.digest,
        "reference": start.digest,
        "temperature": settings.temperature,
        "kl/sequence_mean": estimate.value,
        "ci95": estimate.ci95,
        "kl": float(kl.sum() / sum(sequences.sampled())),
    }
    if config.rollout.masked_by:
        summary["masked_by"] = config.rollout.masked_by
    if ranks.current().first:
        write_json(output, summary)
    interval = " (95% interval {:.3g} to {:.3g})".format(*estimate.ci95) if estimate.ci95 else ""
    measure = "KL from policy 0" if settings.temperature else "log-ratio to policy 0 of greedy completions"
    if config.rollout.masked_by:
        measure = f"log-ratio to policy 0 of completions under {config.rollout.masked_by}"
    say(f"{measure}: {estimate.value:.3g} nats a completion{interval}")


def _summed(logps: list[list[float]]) -> NDArray[np.float64]:
    """log π of each completion."""
    return np.array([sum(row) for row in logps])
