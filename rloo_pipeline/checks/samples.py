"""What the probe completions are like: rewards, form, length, variety."""

from __future__ import annotations

import numpy as np

from rloo_pipeline.checks.evidence import Evidence
from rloo_pipeline.checks.registry import Measure, check
from rloo_pipeline.evaluation.statistics import Estimate, estimate_scores, estimate_share, pass_at_ks


@check("scorable", bad="below")
def scorable(seen: Evidence) -> Measure:
    """Share of the completions that have a reward."""
    share = float(np.mean(~np.isnan(seen.rewards)))
    return Measure(
        share,
        f"{share:.1%}",
        "The reward functions score the completions.",
        "no reward function could score most completions of the probe prompts; check the columns that they read.",
    )


@check("mean_reward", bad="below")
def mean_reward(seen: Evidence) -> Measure:
    """Mean over prompts of the mean reward of a prompt's scorable completions."""
    found = estimate_scores(seen.rewards, seen.resamples, seen.seed)
    if found is None:
        return Measure(None, "–", "", "no completion has a reward; check the columns that the rewards read.")
    return Measure(
        found.value,
        f"{found.value:.3g}" + (" ({:.3g} to {:.3g})".format(*found.ci95) if found.ci95 else ", each"),
        "Where the first round begins.",
        "The rewards are low: ease the prompts or the rewards, or train on demonstrations first.",
    )


@check("pass_at_1", bad="below")
def pass_at_1(seen: Evidence) -> Measure:
    """Chance that a completion is right."""
    found = estimate_share(pass_at_ks(seen.right)[1], seen.right.shape[1])
    return Measure(found.value, _share(found), "The share of right answers at the first try.", "Few answers are right.")


@check("pass_at_k", bad="below", sft=True)
def pass_at_k(seen: Evidence) -> Measure:
    """Chance that one of K completions is right (Chen et al. 2021), for the largest power of 2 up to the trial's K."""
    passes = pass_at_ks(seen.right)
    best = max(passes)
    found = estimate_share(passes[best], seen.right.shape[1] // best)
    return Measure(
        found.value,
        f"pass@{best} {_share(found)}",
        "The policy can solve a good part of the prompts, if not each time.",
        "Most prompts are never solved, so RLOO has nothing to make likelier: train on demonstrations first "
        "(warmstart.sft), or ease the prompts.",
    )


@check("truncated", bad="above")
def truncated(seen: Evidence) -> Measure:
    """Share of completions that reach the length limit."""
    share = float(seen.truncated.mean())
    low, middle, high = (int(np.quantile(seen.lengths, q, method="nearest")) for q in (0.05, 0.5, 0.95))
    return Measure(
        share,
        f"{share:.1%}; half are up to {middle} tokens long, 9 in 10 from {low} to {high}, the limit is {seen.longest}",
        "Completions end by themselves.",
        "Many completions are cut off before their answer: raise rollout.max_completion_length or ask for less.",
    )


@check("format_rate", bad="below", sft=True)
def format_rate(seen: Evidence) -> Measure | None:
    """Share of completions in the form that the format reward asks for."""
    if seen.in_form is None:
        return None
    share = float(seen.in_form.mean())
    return Measure(
        share,
        f"{share:.1%}",
        "The policy knows the form of an answer.",
        "The policy does not know the form of an answer: say it in the prompt, or train on demonstrations first.",
    )


@check("duplicates", bad="above")
def duplicates(seen: Evidence) -> Measure:
    """Share of completions that repeat one of their siblings word by word."""
    share = float(np.mean([1 - len(set(group)) / len(group) for group in seen.texts]))
    return Measure(
        share,
        f"{share:.1%}",
        "Siblings differ.",
        "Most completions repeat a sibling, which teaches nothing: raise rollout.temperature.",
    )


def _share(found: Estimate) -> str:
    low, high = found.ci95 or (0.0, 1.0)
    return f"{found.value:.1%} ({low:.1%} to {high:.1%})"
