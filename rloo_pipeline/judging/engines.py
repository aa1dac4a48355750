"""Checks that sampler and trainer compute the same policy, and of the log-probs that it gives."""

from __future__ import annotations

import math

import numpy as np

from rloo_pipeline.judging.evidence import Evidence
from rloo_pipeline.judging.registry import CheckResult, check
from rloo_pipeline.judging.statistics import Array


@check(bad="above")
def packed_logprobs(evidence: Evidence) -> CheckResult:
    """Largest difference of a token's log-prob between the packed model and plain transformers, in nats.

    Measured on a small copy of the model in float32. Above 1e-3 the stage fails before any check runs.
    """
    return CheckResult(
        evidence.packed,
        f"{evidence.packed:.2g} nats at most, on a small copy in float32",
        "Packed sequences get the same log-probs and gradients as each sequence alone in plain transformers.",
        "Packed sequences get other log-probs than each sequence alone; if that is only rounding, accept it.",
    )


@check(bad="above")
def logprob_difference(evidence: Evidence) -> CheckResult | None:
    """Difference of a token's log-prob between vLLM and the trainer, in nats.

    The largest in float32; the mean in 16 bits, where rounding alone moves single tokens far apart.
    """
    if evidence.differences is None:
        return None
    sizes = np.abs(evidence.differences)
    mean, largest = (float(sizes.mean()), float(sizes.max())) if len(sizes) else (0.0, 0.0)
    return CheckResult(
        largest if evidence.dtype == "float32" else mean,
        f"{largest:.2g} nats at most, {mean:.2g} on average, {evidence.dtype}",
        f"vLLM and the trainer give the same tokens the same log-probs, within the precision of {evidence.dtype}.",
        "vLLM and the trainer do not compute the same policy: try float32 to see whether it is rounding, else look for "
        "a different template, different weights or a kernel; algorithm.mismatch corrects the remaining difference.",
    )


@check(bad="above")
def logprob_difference_q95(evidence: Evidence) -> CheckResult | None:
    """95% quantile of that difference, which shows first if some of the tokens are computed differently."""
    if evidence.differences is None:
        return None
    sizes = np.abs(evidence.differences)
    value = float(np.quantile(sizes, 0.95)) if len(sizes) else 0.0
    return CheckResult(
        value,
        f"{value:.2g} nats, {evidence.dtype}",
        f"Few tokens differ more between vLLM and the trainer than the precision of {evidence.dtype} explains.",
        "Some tokens have other log-probs in vLLM than in the trainer: see whether they come after some length, after "
        "some token, or in long completions; try float32 to see whether it is rounding.",
    )


@check(bad="above", sft=True)
def perplexity(evidence: Evidence) -> CheckResult | None:
    """exp of the mean negative log-prob per token, on demonstrations that SFT trains on."""
    if evidence.demonstrations is None:
        return None
    return CheckResult(
        _perplexity(evidence.demonstrations),
        f"{_perplexity(evidence.demonstrations):.3g}",
        "The policy finds the demonstrations likely.",
        "The policy finds the demonstrations unlikely: train on them (longer), or check that they follow its template.",
    )


@check(bad="above", sft=True)
def perplexity_held_out(evidence: Evidence) -> CheckResult | None:
    """Perplexity on demonstrations that SFT does not train on."""
    if evidence.held_out is None:
        return None
    return CheckResult(
        _perplexity(evidence.held_out),
        f"{_perplexity(evidence.held_out):.3g}",
        "The policy finds demonstrations likely that it was not trained on.",
        "The policy finds held-out demonstrations unlikely: add more demonstrations, or train on them longer.",
    )


@check(bad="above")
def overfitting(evidence: Evidence) -> CheckResult | None:
    """Perplexity on held-out demonstrations divided by that on those trained on."""
    if evidence.demonstrations is None or evidence.held_out is None:
        return None
    ratio = _perplexity(evidence.held_out) / _perplexity(evidence.demonstrations)
    return CheckResult(
        ratio,
        f"{ratio:.3g} times",
        "Held-out demonstrations are about as likely as those trained on.",
        "SFT memorized its demonstrations; lower warmstart.sft.steps or add more demonstrations.",
    )


@check(bad="below")
def entropy(evidence: Evidence) -> CheckResult:
    """Mean entropy of the next token over the probe completions, in nats, at the sampling temperature."""
    mean = float(evidence.entropies.mean())
    return CheckResult(
        mean,
        f"{mean:.3g} nats per token",
        "The policy is random enough to explore.",
        "The policy is nearly deterministic, so siblings will be alike; raise rollout.temperature or shorten SFT.",
    )


def _perplexity(logps: Array) -> float:
    return math.exp(min(-float(logps.mean()), 700.0))
