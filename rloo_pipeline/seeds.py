"""Seeds that depend on what is sampled and on nothing else.

The seed of a sample comes from (run seed, purpose, round, prompt, sample), so neither shards, nor the order of a
batch, nor a restart changes a draw.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache


@lru_cache(2**17)
def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed from the run's seed and the names of what it is for.

    The names are length-prefixed before hashing, so that ("a", "bc") and ("ab", "c") differ. Those of a round are asked
    for when it is lined up, and again by its stage.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in (seed, *names):
        part = str(name).encode()
        digest.update(len(part).to_bytes(4, "big") + part)
    return int.from_bytes(digest.digest(), "big") >> 1


def permutation(length: int, seed: int) -> list[int]:
    """0 … length-1 in an order given by the seed alone (Python's Mersenne Twister, stable across versions)."""
    order = list(range(length))
    random.Random(seed).shuffle(order)
    return order


def rows_of_round(length: int, count: int, round_: int, seed: int) -> list[int]:
    """The `count` dataset rows that round `round_` (from 1) samples from, none of them twice. Needs count <= length.

    Epochs are seeded permutations laid end to end: each row is used once before any is used again. Where a round goes
    on into the next epoch, the rows that it has already taken come last there.
    """
    first, rows, order = (round_ - 1) * count, list[int](), list[int]()
    for epoch in range((first + count - 1) // length + 1):
        begun = epoch * length % count
        taken = set(order[length - begun :] if begun else ())
        drawn = permutation(length, derive(seed, "epoch", epoch))
        order = [row for row in drawn if row not in taken] + [row for row in drawn if row in taken]
        offset = first - epoch * length
        rows += order[max(0, offset) : max(0, offset + count)]
    return rows


def cut(items: int, parts: int, part: int) -> range:
    """The contiguous share of `items` that falls to `part` (from 0) of `parts`; sizes differ by one at the most."""
    return range(items * part // parts, items * (part + 1) // parts)
