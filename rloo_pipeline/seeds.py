"""Derives seeds that depend only on what is being drawn.

The seed of a sample is derived from (run seed, purpose, round, prompt, sample), so it does not depend on the number of
shards, the order of a batch, or restarts.
"""

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice


@lru_cache(2**17)
def derive(seed: int, *names: str | int) -> int:
    """Derives a 63-bit seed from the run's seed and names that describe its purpose.

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
        length: number of rows in the dataset.
        count: rows of a round; at most `length`.
        round_: number of the round, from 1.
        seed: seed of the order.
    """
    first = (round_ - 1) * count
    return [*islice(_rows(length, count, seed), first, first + count)]


def earlier_rounds(rows: Iterable[int], length: int, count: int, last: int, seed: int) -> dict[int, int]:
    """Row → latest round up to `last` that sampled it, for those of `rows` that were sampled. Other arguments are as
    for `rows_of_round`.
    """
    wanted, found = set(rows), dict[int, int]()
    for place, row in enumerate(islice(_rows(length, count, seed), last * count)):
        if row in wanted:
            found[row] = place // count + 1
    return found


def _rows(length: int, count: int, seed: int) -> Iterator[int]:
    """Yields the rows of all epochs, in order."""
    order: list[int] = []
    for epoch in itertools.count():
        carried_over = epoch * length % count
        used = set(order[length - carried_over :] if carried_over else ())
        shuffled = permutation(length, derive(seed, "epoch", epoch))
        order = [row for row in shuffled if row not in used] + [row for row in shuffled if row in used]
        yield from order


def rows_for_refill(length: int, sampled: Iterable[int], round_: int, seed: int) -> list[int]:
    """Rows of the dataset that a round has not sampled, in random order. Its refill starts with the first of them.

    Args:
        length: number of rows in the dataset.
        sampled: rows that the round samples anyway.
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
