"""Checks that sampler and trainer compute the same policy, and checks of the policy's log-probs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rloo_pipeline.checks.registry import CheckResult, check

if TYPE_CHECKING:
    from rloo_pipeline.checks.statistics import Array


@check(bad="above", warn=1e-4, fail=1e-3)
def packed_logprobs(packed: float) -> CheckResult:
    """Largest difference of a token's log-prob between the packed model and plain transformers, in nats.

    Measured on a small copy of the model in float32. Above 1e-3 the stage fails before any check runs.
    """
    return CheckResult(
        packed,
        f"{packed:.2g} nats at most, on a small copy in float32",
        "The trainer's batches get the same log-probs and gradients as each sequence alone in plain transformers.",
        "The trainer's batches get different log-probs than each sequence alone; if that is only rounding, accept it.",
    )


# The limits lie between rounding and a wrong attention mask. Measured on random models of 4 to 32 layers against the
# same model in float32, mean difference in nats: 0.01 to 0.04 in bfloat16 (0.16 with experts), 0.001 to 0.02 in
# float16; 0.8 to 2.5 where packed sequences attend to each other, 0.15 to 0.8 where the sliding window is missing. FP8
# weights and inputs of linear layers, emulated in PyTorch by each scheme of `rollout.quantization`: 0.03 where weights
# deviate by 0.02, 0.35 where they deviate by 0.1.
@check(
    bad="above",
    warn={"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02, "fp8": 0.35},
    fail={"float32": 1e-2, "bfloat16": 0.3, "float16": 0.1, "fp8": 0.7},
)
def logprob_difference(differences: Array, dtype: str) -> CheckResult:
    """Difference between vLLM's and the trainer's log-probs in nats: for any token in float32, on average in 16 bits.

    In 16 bits, rounding alone moves single tokens far apart.
    """
    sizes = abs(differences)
    mean, largest = (float(sizes.mean()), float(sizes.max())) if len(sizes) else (0.0, 0.0)
    return CheckResult(
        largest if dtype == "float32" else mean,
        f"{largest:.2g} nats at most, {mean:.2g} on average, {dtype}",
        f"vLLM and the trainer give the same tokens the same log-probs, within the precision of {dtype}.",
        "vLLM and the trainer do not compute the same policy: try float32 to see whether it is rounding; if not, look "
        "for a different template, different weights or a kernel; algorithm.mismatch corrects what remains.",
    )


@check(
    bad="above",
    warn={"float32": 1e-3, "bfloat16": 0.4, "float16": 0.1, "fp8": 0.9},
    fail={"float32": 1e-2, "bfloat16": 1.0, "float16": 0.4, "fp8": 2.0},
)
def logprob_difference_q95(differences: Array, dtype: str) -> CheckResult:
    """95% quantile, over tokens, of that difference in nats. It shows first if some tokens are computed differently."""
    import numpy as np

    value = float(np.quantile(abs(differences), 0.95)) if len(differences) else 0.0
    return CheckResult(
        value,
        f"{value:.2g} nats, {dtype}",
        f"Few tokens differ more between vLLM and the trainer than the precision of {dtype} explains.",
        "Some tokens have different log-probs in vLLM and the trainer: check whether they come after a certain length "
        "or token, or in long completions; try float32 to see whether it is rounding.",
    )


@check(bad="above", warn=20)
def perplexity(demonstrations: Array) -> CheckResult:
    """exp of the mean negative log-prob per token, on demonstrations that SFT trains on."""
    return CheckResult(
        _perplexity(demonstrations),
        f"{_perplexity(demonstrations):.3g}",
        "The demonstrations are likely under the policy.",
        "The demonstrations are unlikely under the policy: train on them longer, or check that they use its template.",
    )


@check(bad="above", warn=20)
def perplexity_held_out(held_out: Array) -> CheckResult:
    """Perplexity on demonstrations that SFT does not train on."""
    return CheckResult(
        _perplexity(held_out),
        f"{_perplexity(held_out):.3g}",
        "Demonstrations that the policy was not trained on are also likely.",
        "Held-out demonstrations are unlikely under the policy: add more demonstrations, or train on them longer.",
    )


@check(bad="above", warn=1.5)
def overfitting(demonstrations: Array, held_out: Array) -> CheckResult:
    """Perplexity on held-out demonstrations divided by that on those trained on."""
    ratio = _perplexity(held_out) / _perplexity(demonstrations)
    return CheckResult(
        ratio,
        f"{ratio:.3g} times",
        "Held-out demonstrations are about as likely as those trained on.",
        "SFT memorized its demonstrations; lower warmstart.sft.steps or add more demonstrations.",
    )


@check(bad="below", warn=0.01)
def entropy(entropies: Array) -> CheckResult:
    """Mean entropy of the next token over the probe completions, in nats, at the sampling temperature."""
    mean = float(entropies.mean())
    return CheckResult(
        mean,
        f"{mean:.3g} nats per token",
        "The policy is random enough to explore.",
        "The policy is nearly deterministic, so a group will be alike; raise rollout.temperature or shorten SFT.",
    )


def _perplexity(logps: Array) -> float:
    return math.exp(min(-float(logps.mean()), 700.0))
