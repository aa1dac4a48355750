"""Sampler and trainer see the same policy, and what it finds likely."""

from __future__ import annotations

import math

import numpy as np

from rloo_pipeline.checks.evidence import Array, Evidence
from rloo_pipeline.checks.registry import Measure, check


@check("packed_logprobs", bad="above")
def packed_logprobs(seen: Evidence) -> Measure:
    """Largest difference of a token's log-prob between the packed model and plain transformers, nats.

    On a small copy of the model in float32; what is above 1e-3 ends the stage before there are checks.
    """
    return Measure(
        seen.packed,
        f"{seen.packed:.2g} nats at most, on a small copy in float32",
        "Packed side by side, sequences get the log-probs and gradients that each has alone in plain transformers.",
        "Packed sequences get other log-probs than each alone; it may be rounding, in which case accept it.",
    )


@check("logprob_difference", bad="above")
def logprob_difference(seen: Evidence) -> Measure | None:
    """Difference of a token's log-prob between vLLM and the trainer, nats: in float32 the largest; in 16 bits, where
    single tokens are far apart by rounding alone, the mean.
    """
    if seen.differences is None:
        return None
    sizes = np.abs(seen.differences)
    mean, largest = (float(sizes.mean()), float(sizes.max())) if len(sizes) else (0.0, 0.0)
    return Measure(
        largest if seen.dtype == "float32" else mean,
        f"{largest:.2g} nats at most, {mean:.2g} in the mean, {seen.dtype}",
        f"vLLM and the trainer give the same tokens the same log-probs, as far as {seen.dtype} goes.",
        "vLLM and the trainer do not compute the same policy: take float32 to see whether it is rounding, else look "
        "for another template, other weights or a kernel; algorithm.mismatch corrects what is left.",
    )


@check("logprob_difference_q95", bad="above")
def logprob_difference_q95(seen: Evidence) -> Measure | None:
    """The difference that 95% of the tokens stay below: what part of them is computed otherwise shows here first."""
    if seen.differences is None:
        return None
    sizes = np.abs(seen.differences)
    value = float(np.quantile(sizes, 0.95)) if len(sizes) else 0.0
    return Measure(
        value,
        f"{value:.2g} nats, {seen.dtype}",
        f"Few tokens are further apart in vLLM and the trainer than {seen.dtype} explains.",
        "A part of the tokens has other log-probs in vLLM than in the trainer: see whether it is those behind some "
        "length, behind some token, or in long completions; take float32 to see whether it is rounding.",
    )


@check("perplexity", bad="above", sft=True)
def perplexity(seen: Evidence) -> Measure | None:
    """exp of the mean negative log-prob a token, on demonstrations that SFT trains on."""
    if seen.demonstrations is None:
        return None
    return Measure(
        _perplexity(seen.demonstrations),
        f"{_perplexity(seen.demonstrations):.3g}",
        "The policy finds the demonstrations likely.",
        "The demonstrations surprise the policy: train on them (longer), or see whether they have its template's form.",
    )


@check("perplexity_held_out", bad="above", sft=True)
def perplexity_held_out(seen: Evidence) -> Measure | None:
    """The same on demonstrations that SFT does not train on."""
    if seen.held_out is None:
        return None
    return Measure(
        _perplexity(seen.held_out),
        f"{_perplexity(seen.held_out):.3g}",
        "The policy finds demonstrations likely that it was not trained on.",
        "Demonstrations that were not trained on surprise the policy: bring more of them, or train on them longer.",
    )


@check("overfitting", bad="above")
def overfitting(seen: Evidence) -> Measure | None:
    """Perplexity on held-out demonstrations divided by that on those trained on."""
    if seen.demonstrations is None or seen.held_out is None:
        return None
    ratio = _perplexity(seen.held_out) / _perplexity(seen.demonstrations)
    return Measure(
        ratio,
        f"{ratio:.3g} times",
        "Held-out demonstrations are about as likely as those trained on.",
        "SFT learned its demonstrations by heart; lower warmstart.sft.steps or bring more demonstrations.",
    )


@check("entropy", bad="below")
def entropy(seen: Evidence) -> Measure:
    """Mean entropy of the next token over the probe completions, nats, at the sampling temperature."""
    mean = float(seen.entropies.mean())
    return Measure(
        mean,
        f"{mean:.3g} nats a token",
        "The policy is undecided enough to try several ways.",
        "The policy is nearly deterministic, so siblings will be alike; raise rollout.temperature or shorten SFT.",
    )


def _perplexity(logps: Array) -> float:
    return math.exp(min(-float(logps.mean()), 700.0))
