"""What the checks see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TokenFacts:
    """What tokenizer, generation config and chat template say of the probe prompts."""

    prompts: int
    changed: int
    """Prompts whose ids, as text and back as ids, are no longer the same."""
    double_bos: int
    """Prompts that begin with two BOS tokens."""
    chats: int
    """Prompts that are messages and go through the chat template."""
    opened: int
    """Of these, those whose ids end in what the template puts before an answer."""
    generation_prompt: str
    """That text, as the first of them has it."""
    pad: int | None
    """None where the tokenizer has none of its own and EOS stands for it."""
    eos: int | None
    stops: tuple[int, ...]
    """Ids at which the sampler ends a completion."""
    configured: tuple[int, ...] | None
    """End tokens of generation_config.json; None where there is no such file."""
    turn_end: tuple[int, str] | None
    """The token by which the template ends an answer; None where there is no template or it has no such token."""


@dataclass(frozen=True)
class Evidence:
    """A trial of a policy on P probe prompts with K completions each."""

    tokens: TokenFacts
    packed: float
    """Largest difference of a token's log-prob that the model's self-check found, nats."""
    dtype: str
    longest: int
    """max_completion_length of the trial."""
    rewards: Array
    """[P, K], NaN where unscorable."""
    right: NDArray[np.bool_]
    """[P, K]"""
    lengths: NDArray[np.int64]
    """[P, K] tokens"""
    truncated: NDArray[np.bool_]
    """[P, K]"""
    texts: list[list[str]]
    """[P][K]"""
    in_form: NDArray[np.bool_] | None
    """[P, K] whether the format reward is at least 1; None where there is no such reward."""
    differences: Array | None
    """[tokens] log-prob of the sampler less that of the trainer; None where they are not of the same distribution."""
    entropies: Array
    """[tokens] nats"""
    demonstrations: Array | None
    """[tokens] log-probs of demonstrations that SFT trains on; None where there are none."""
    held_out: Array | None
    """[tokens] the same of demonstrations that it does not train on."""
    num_generations: int
    """K of the rounds; the trial's own may be another."""
    seed: int
    resamples: int = 2000
    """Of the bootstrap."""
