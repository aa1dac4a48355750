"""Length of completions in tokens: a soft limit, a target length, a medium length in full sentences.

`algorithm.response_length` applies the first two within the update; as rewards they have a column, a weight and a place
in the report.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.completion_text import after_thinking, text_of

_ENDING = re.compile(r"[.!?…。！？][\"'”’)\]*_]*\s*\Z")
_BEGINNING = re.compile(r"\s*[\"'“‘(\[*_]*(?:[^\W\d_]|\d)")


def overlong_reward(completion_ids: list[list[int]], longest: int, cache: int) -> list[float]:
    """0 up to longest − cache tokens, then linear down to −1 at `longest` tokens and beyond.

    Yu et al. 2025 (DAPO, arXiv 2503.14476), equation 13.

    Raises:
        UserError: `cache` is not from 1 to `longest`.
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
        completion_ids: token ids of each completion.
        target: target length in tokens: an option, or a dataset column of that name.

    Raises:
        UserError: a target is below 1.
    """
    targets = [target] * len(completion_ids) if isinstance(target, int) else list(target)
    if any(length < 1 for length in targets):
        raise UserError(f"target_length_reward: target must be at least 1 token, not {min(targets)}")
    return [-abs(len(ids) - length) / length for ids, length in zip(completion_ids, targets, strict=True)]


def medium_length_reward(
    completions: list[Any],
    completion_ids: list[list[int]],
    shortest: int = 20,
    longest: int = 200,
    length_share: float = 0.5,
) -> list[float]:
    """A heuristic for well-formed replies of medium length.

    The score is `length_share` for a medium length plus `1 - length_share` for full sentences: the text after the
    thinking begins with a capital letter, a digit or a letter without case, and ends with a full stop, an exclamation
    mark or a question mark.

    Args:
        completions: strings, or lists of messages; the last message counts.
        completion_ids: token ids of each completion.
        shortest: fewest tokens of a medium length.
        longest: most tokens of a medium length.
        length_share: from 0 to 1.

    Raises:
        UserError: `shortest` is not from 0 to `longest`.
    """
    if not 0 <= shortest <= longest:
        raise UserError(f"medium_length_reward: shortest ({shortest}) must be from 0 to longest ({longest})")
    return [
        length_share * (shortest <= len(ids) <= longest) + (1 - length_share) * _full_sentences(text_of(completion))
        for completion, ids in zip(completions, completion_ids, strict=True)
    ]


def _full_sentences(text: str) -> bool:
    reply = after_thinking(text)
    beginning = _BEGINNING.match(reply)
    return beginning is not None and not beginning[0][-1].islower() and _ENDING.search(reply) is not None
