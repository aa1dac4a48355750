"""Which groups teach: RLOO learns from no group whose rewards are all the same."""

from __future__ import annotations

import numpy as np

from rloo_pipeline.checks.evidence import Evidence
from rloo_pipeline.checks.mixing import LARGEST, Mixing, fit
from rloo_pipeline.checks.registry import Measure, check

WANTED = 0.8
"""Share of mixed groups that a K is named for."""


@check("all_right", bad="above")
def all_right(seen: Evidence) -> Measure:
    """Share of groups whose completions are all right."""
    share = float(seen.right.all(axis=1).mean())
    return Measure(
        share,
        f"{share:.1%} of {len(seen.right)} groups",
        "There are prompts left to learn from.",
        "The policy solves these prompts each time: bring harder ones.",
    )


@check("all_wrong", bad="above", sft=True)
def all_wrong(seen: Evidence) -> Measure:
    """Share of groups none of whose completions is right."""
    share = float((~seen.right).all(axis=1).mean())
    return Measure(
        share,
        f"{share:.1%} of {len(seen.right)} groups",
        "Most prompts are solved now and then.",
        "Most groups have no right answer: train on demonstrations first (warmstart.sft), ease the prompts, or raise "
        "rollout.num_generations.",
    )


@check("mixed", bad="below")
def mixed(seen: Evidence) -> Measure:
    """Share of groups with right and wrong completions, and the K at which 80% would be."""
    share = mixed_share(seen)
    found = mixing_of(seen)
    named = found.samples_for(WANTED) if found else None
    want = (
        f"{WANTED:.0%} would be mixed at K = {named} (beta-binomial)"
        if named
        else f"no K up to {LARGEST} would mix {WANTED:.0%} (beta-binomial)"
        if found
        else "all are alike, so that no K can be named"
    )
    return Measure(
        share,
        f"{share:.1%} of groups at K = {seen.right.shape[1]}; {want}",
        "Right and wrong answers stand side by side, which is what RLOO learns from.",
        f"Few groups have right and wrong answers side by side; {want}.",
    )


@check("wasted", bad="above")
def wasted(seen: Evidence) -> Measure:
    """Expected share of a round's completions in groups that are all right or all wrong, at the rounds' K."""
    found = mixing_of(seen)
    share = 1 - (found.mixed(seen.num_generations) if found else mixed_share(seen))
    return Measure(
        share,
        f"{share:.1%} at K = {seen.num_generations} ({'beta-binomial' if found else 'all groups are alike'})",
        "Most completions of a round are of groups with right and wrong answers.",
        "Most completions of a round would teach nothing about right and wrong: raise rollout.num_generations, or "
        "rollout.oversample to choose among groups.",
    )


@check("teaching", bad="below", sft=True)
def teaching(seen: Evidence) -> Measure:
    """Share of groups with at least two different rewards."""
    known = seen.rewards[~np.isnan(seen.rewards)]
    share = float(np.mean([len(set(group[~np.isnan(group)])) > 1 for group in seen.rewards]))
    alike = (
        f"all {len(known)} scored completions of all probe prompts got the same reward ({known[0]:g})"
        if len(known) and share == 0
        else f"only {share:.0%} of groups have different rewards"
    )
    return Measure(
        share,
        f"{share:.1%} of groups",
        "Rewards differ within the groups.",
        f"{alike}, so RLOO could learn {'nothing' if share == 0 else 'little'}; train on demonstrations first "
        "(warmstart.sft), ease the prompts or the rewards, or raise rollout.temperature or num_generations.",
    )


def mixed_share(seen: Evidence) -> float:
    """Share of the trial's groups that have right and wrong completions."""
    return float((seen.right.any(axis=1) & ~seen.right.all(axis=1)).mean())


def mixing_of(seen: Evidence) -> Mixing | None:
    """The distribution of the chance of being right over prompts."""
    return fit(seen.right.sum(axis=1), seen.right.shape[1])
