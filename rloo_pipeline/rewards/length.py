"""Length of completions in tokens: a soft limit, a length asked for, a medium length in full sentences.

`algorithm.shaping` has the first two for the update itself; as rewards they have a column, a weight and a report of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rloo_pipeline.errors import UserError
from rloo_pipeline.scoring.scoring import text_of

_ENDING = re.compile(r"[.!?…。！？][\"'”’)\]*_]*\s*\Z")
_BEGINNING = re.compile(r"\s*[\"'“‘(\[*_]*(?:[^\W\d_]|\d)")


def overlong_reward(completion_ids: list[list[int]], longest: int, cache: int) -> list[float]:
    """0 up to longest − cache tokens, then linearly down to −1 at `longest` and beyond.

    Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13.
    """
    if not 0 < cache <= longest:
        raise UserError(
            f"overlong_reward: the option cache must be above 0 and at most longest ({longest}), not {cache}"
        )
    return [max(-1.0, min(0.0, (longest - cache - len(ids)) / cache)) for ids in completion_ids]


def target_length_reward(completion_ids: list[list[int]], target: int | Sequence[int]) -> list[float]:
    """−|length − target| / target.

    Aggarwal and Welleck 2025 (L1, arXiv 2503.04697), equation 1, with α = 1/target.

    Args:
        completion_ids: tokens of each completion.
        target: tokens asked for: an option, or a column of that name.
    """
    targets = [target] * len(completion_ids) if isinstance(target, int) else list(target)
    if any(asked < 1 for asked in targets):
        raise UserError(f"target_length_reward: target must be at least 1 token, not {min(targets)}")
    return [-abs(len(ids) - asked) / asked for ids, asked in zip(completion_ids, targets, strict=True)]


def medium_length_reward(
    completions: list[Any],
    completion_ids: list[list[int]],
    shortest: int = 20,
    longest: int = 200,
    length_share: float = 0.5,
) -> list[float]:
    """A heuristic for well-formed replies of medium length: `length_share` for the length, the rest for full sentences.

    Args:
        completions: text, or messages of which the last one counts.
        completion_ids: tokens of each completion.
        shortest: fewest tokens of a medium length.
        longest: most tokens of a medium length.
        length_share: what a medium length earns, from 0 to 1; full sentences (from a capital letter, a figure or a
            letter without case, to a full stop, an exclamation or a question mark) earn the rest.
    """
    if not 0 <= shortest <= longest:
        raise UserError(f"medium_length_reward: shortest ({shortest}) must be from 0 to longest ({longest})")
    return [
        length_share * (shortest <= len(ids) <= longest) + (1 - length_share) * _full_sentences(text_of(completion))
        for completion, ids in zip(completions, completion_ids, strict=True)
    ]


def _full_sentences(text: str) -> bool:
    """Whether what follows the thinking begins and ends as sentences do."""
    said = text.rpartition("</think>")[2]
    begun = _BEGINNING.match(said)
    return begun is not None and not begun[0][-1].islower() and _ENDING.search(said) is not None
