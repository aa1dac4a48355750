"""Seeds that depend on what is sampled and on nothing else.

The seed of a sample comes from (run seed, purpose, round, prompt, sample), so neither shards, nor the order of a
batch, nor a restart changes a draw.
"""

from __future__ import annotations

import hashlib
import random


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed from the run's seed and the names of what it is for.

    The names are length-prefixed before hashing, so that ("a", "bc") and ("ab", "c") differ.
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
    """The `count` dataset rows that round `round_` (from 1) samples from; no row twice in a round.

    Each epoch is a seeded permutation cut into whole rounds; what is left of it is dropped, as data loaders do
    (`drop_last`). Needs count <= length.
    """
    rounds_per_epoch = length // count
    epoch, place = divmod(round_ - 1, rounds_per_epoch)
    order = permutation(length, derive(seed, "epoch", epoch))
    return order[place * count : (place + 1) * count]


def cut(items: int, parts: int, part: int) -> range:
    """The contiguous share of `items` that falls to `part` (from 0) of `parts`; sizes differ by one at the most."""
    return range(items * part // parts, items * (part + 1) // parts)
