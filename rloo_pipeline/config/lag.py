"""How `rollout.lag`, `rollout.token_budget` and `rollout.quantization` constrain `algorithm`: the default correction,
and refused combinations.

With a lag, the completions of a round come from an older policy than the one that its update starts from; with a token
budget, some of their tokens do. The update computes the log-probs of the policy that it starts from, π_old, clips
around it, and weights losses by w = π_old / π_sampler, where π_sampler is the policy that sampled the token: the
decoupled objective (Hilton et al. 2022, "Batch size-invariance for policy optimization", arXiv 2110.00641; AReaL, Fu et
al. 2025, arXiv 2505.24298).

With quantized weights, completions come from a different distribution than the policy's; the same weights correct for
that (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
"""

from collections.abc import Iterator
from typing import Any

from rloo_pipeline.config import presets
from rloo_pipeline.config.algorithm import Algorithm
from rloo_pipeline.config.sampling import Rollout
from rloo_pipeline.config.section import JSON

OF_TOKENS: JSON = {"correction": "token_mis", "min": 0.5, "max": 5.0}
"""IcePop's mask with its thresholds (arXiv 2510.18855); AReaL drops tokens above 5 too (`behav_imp_weight_cap`)."""
OF_COMPLETIONS: JSON = {"correction": "sequence_tis", "max": 2.0}
"""The weight of the whole completion, truncated at 2 as in Yao et al. 2025 and TRL. It drops no completion."""
OF_QUANTIZED_TOKENS: JSON = {"correction": "token_tis", "max": 2.0}
"""The weight of each token, truncated at 2, as Yao et al. 2025 use for FP8 rollouts."""


def fill(values: Any) -> Any:
    """Adds the default correction to a configuration that samples from older or quantized policies and names no
    correction.

    It also overrides a preset's `correction: none`, which is meant for sampling from the policy itself.
    """
    rollout, algorithm = (values.get(name, {}) for name in ("rollout", "algorithm"))
    if not isinstance(rollout, dict) or not isinstance(algorithm, dict):
        return values
    mismatch = algorithm.get("mismatch", {})
    is_older = rollout.get("lag", 0) not in (0, None) or rollout.get("token_budget") is not None
    is_quantized = rollout.get("quantization") is not None
    if not (is_older or is_quantized) or not isinstance(mismatch, dict) or "correction" in mismatch:
        return values
    chosen = {**presets.PRESETS.get(str(algorithm.get("preset")), {}), **algorithm}
    if chosen.get("old_logps") == "sampler":
        return values
    of_tokens = OF_TOKENS if is_older else OF_QUANTIZED_TOKENS
    default = of_tokens if chosen.get("importance_sampling_level") == "token" else OF_COMPLETIONS
    return {**values, "algorithm": {**algorithm, "mismatch": {**default, **mismatch}}}


def problems(rollout: Rollout, algorithm: Algorithm) -> Iterator[str]:
    """A sentence for each way in which completions of an older or quantized policy are not weighted."""
    lag = f"rollout.lag: {rollout.lag}" if rollout.lag else None
    if rollout.token_budget is not None:
        lag = f"rollout.token_budget: {rollout.token_budget}"
    if algorithm.old_logps == "sampler" and algorithm.clip == "none" and (lag or rollout.quantization):
        yield (
            f"{lag or f'rollout.quantization: {rollout.quantization}'} trains on completions from a different "
            "distribution than the policy's, and with algorithm.clip: none no ratio weights them; set "
            "algorithm.old_logps: trainer, or clip: ppo"
        )
    if lag and algorithm.old_logps == "trainer" and algorithm.mismatch.correction == "none":
        yield (
            f"{lag} trains on completions of an older policy, and with algorithm.mismatch.correction: none and "
            "old_logps: trainer nothing weights them; leave mismatch.correction out, which sets "
            f"{OF_TOKENS['correction']} for tokens and {OF_COMPLETIONS['correction']} for completions"
        )


def note(rollout: Rollout, algorithm: Algorithm) -> str | None:
    """A sentence if the user turned off the correction for the sampler's quantized weights."""
    if rollout.quantization is None or algorithm.old_logps == "sampler" or algorithm.mismatch.correction != "none":
        return None
    return (
        f"algorithm.mismatch.correction: none with rollout.quantization: {rollout.quantization}: the trainer takes "
        "samples of the quantized model for the policy's own, so the gradient is biased; leave mismatch.correction "
        "out, unless you want to see that"
    )
