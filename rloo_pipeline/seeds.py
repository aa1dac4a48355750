"""Seeds that depend only on what is drawn.

The seed of a sample is derived from (run seed, purpose, round, prompt, sample), so the number of shards, the order of a
batch and a restart do not change it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from functools import lru_cache


@lru_cache(2**17)
def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed from the run's seed and the names of what it is for.

    Names are length-prefixed before hashing, so that ("a", "bc") and ("ab", "c") give different seeds. The cache holds
    the seeds of a round, which are needed when its requests are queued and again in its stage.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in (seed, *names):
        part = str(name).encode()
        digest.update(len(part).to_bytes(4, "big") + part)
    return int.from_bytes(digest.digest(), "big") >> 1


def permutation(length: int, seed: int) -> list[int]:
    """0 … length-1 in random order (Python's Mersenne Twister, stable across versions)."""
    order = list(range(length))
    random.Random(seed).shuffle(order)
    return order


def rows_of_round(length: int, count: int, round_: int, seed: int) -> list[int]:
    """Rows of the dataset that a round samples from, without repetition.

    Epochs are seeded permutations in sequence: each row is used once before any is used again. If a round continues
    into the next epoch, the rows that it already has are moved to the end of that epoch.

    Args:
        length: rows of the dataset.
        count: rows of a round; at most `length`.
        round_: number of the round, from 1.
        seed: seed of the order.
    """
    first, rows, order = (round_ - 1) * count, list[int](), list[int]()
    for epoch in range((first + count - 1) // length + 1):
        carried_over = epoch * length % count
        used = set(order[length - carried_over :] if carried_over else ())
        shuffled = permutation(length, derive(seed, "epoch", epoch))
        order = [row for row in shuffled if row not in used] + [row for row in shuffled if row in used]
        offset = first - epoch * length
        rows += order[max(0, offset) : max(0, offset + count)]
    return rows


def rows_for_refill(length: int, sampled: Iterable[int], round_: int, seed: int) -> list[int]:
    """Rows of the dataset that a round has not sampled, in random order: its refill begins with the first of them.

    Args:
        length: rows of the dataset.
        sampled: rows that the round samples in any case.
        round_: number of the round, from 1.
        seed: seed of the order.
    """
    used = set(sampled)
    return [row for row in permutation(length, derive(seed, "refill", round_)) if row not in used]


def shard_range(length: int, shards: int, shard: int) -> range:
    """Indices of shard number `shard` (from 0) when `length` items are split into contiguous shards of nearly equal
    size.
    """
    return range(length * shard // shards, length * (shard + 1) // shards)
