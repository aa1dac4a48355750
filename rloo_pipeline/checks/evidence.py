"""The input of the checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rloo_pipeline.checks.statistics import Array, Flags


@dataclass(frozen=True)
class TokenFacts:
    """Facts about tokenizer, generation config and chat template, measured on the probe prompts."""

    prompts: int
    changed: int
    """Prompts whose ids change when decoded and encoded again."""
    double_bos: int
    """Prompts that begin with two BOS tokens."""
    chats: int
    """Prompts in the form of messages, which go through the chat template."""
    opened: int
    """Chats whose ids end with `generation_prompt`."""
    generation_prompt: str
    """The text that the template puts before an answer, taken from the first chat."""
    pad: int | None
    """Id of the PAD token; None if the tokenizer has none, so that EOS is used."""
    eos: int | None
    stops: tuple[int, ...]
    """Token ids at which the sampler ends a completion."""
    configured: tuple[int, ...] | None
    """End tokens of generation_config.json; None if there is no such file."""
    turn_end: tuple[int, str] | None
    """Id and text of the token that ends an answer in the template; None without a template or such a token."""
    template: tuple[str, ...]
    """Problems of the chat template, one sentence each."""
    ordinary: tuple[str, ...] = ()
    """End tokens that the tokenizer treats as ordinary text, as a generation_config.json of another model has them."""


@dataclass(frozen=True)
class Evidence:
    """A probe of a policy on P prompts with K completions each."""

    tokens: TokenFacts
    packed: float
    """Largest difference of a token's log-prob in the model's self-check, in nats."""
    dtype: str
    longest: int
    """max_completion_length of the probe."""
    rewards: Array
    """[P, K]; NaN for completions that could not be scored."""
    rewarded: bool
    """True if a reward has a weight; otherwise the run learns from a teacher alone, and all rewards are NaN."""
    right: Flags
    """[P, K] True for correct completions."""
    lengths: NDArray[np.int64]
    """[P, K] tokens of each completion."""
    truncated: Flags
    """[P, K] True for completions without an end token."""
    texts: list[list[str]]
    """[P][K] completions as text."""
    in_form: Flags | None
    """[P, K] True where the format reward is at least 1; None without such a reward."""
    differences: Array | None
    """[tokens] log-prob of the sampler minus that of the trainer; None if their distributions differ by design."""
    entropies: Array
    """[tokens] entropies of the sampled tokens' distributions, in nats."""
    demonstrations: Array | None
    """[tokens] log-probs of demonstrations that SFT trains on; None without demonstrations."""
    held_out: Array | None
    """[tokens] log-probs of demonstrations that SFT does not train on; None without them."""
    preferences: Mapping[str, Any] | None
    """Measures of the reward model on held-out preferences (`pair_checks.measures`); None if the run trains none."""
    num_generations: int
    """K of the rounds, which may differ from the probe's."""
    seed: int
