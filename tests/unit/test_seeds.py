"""Seeds and shares depend on what they are for and on nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.seeds import derive, permutation, rows_for_refill, rows_of_round, shard_range


def test_a_seed_depends_on_every_name_and_on_where_one_ends() -> None:
    seeds = {
        derive(0, "a", "bc"),
        derive(0, "ab", "c"),
        derive(1, "a", "bc"),
        derive(0, "a", "bc", 0),
        derive(0, "a", "bc", 1),
    }
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive(7, "round", 1, "x", 3) == derive(7, "round", 1, "x", 3)


def test_seeds_are_the_same_in_every_version() -> None:
    assert derive(0, "round", 1, "prompt", 0) == 5258308049371054456
    assert permutation(5, 1) == [2, 3, 4, 0, 1]


@given(st.integers(1, 40), st.data())
def test_an_epoch_uses_each_row_once_and_a_round_none_twice(length, data) -> None:
    count = data.draw(st.integers(1, length))
    rounds = [rows_of_round(length, count, number, seed=5) for number in range(1, 3 * length // count + 2)]
    stream = [row for rows in rounds for row in rows]
    for start in range(0, len(stream) - length + 1, length):
        assert sorted(stream[start : start + length]) == list(range(length))
    assert all(len(set(rows)) == len(rows) == count for rows in rounds)


@given(st.integers(1, 40), st.data())
def test_a_refill_draws_each_row_that_the_round_has_not_sampled_once(length, data) -> None:
    sampled = rows_of_round(length, data.draw(st.integers(1, length)), 3, seed=5)
    rows = rows_for_refill(length, sampled, 3, seed=5)
    assert sorted([*rows, *sampled]) == list(range(length))
    assert rows_for_refill(99, [], 3, seed=5) != rows_for_refill(99, [], 4, seed=5)


def test_epochs_differ() -> None:
    assert rows_of_round(30, 30, 1, seed=5) != rows_of_round(30, 30, 2, seed=5)


def test_shares_cover_everything_in_order() -> None:
    for parts in range(1, 6):
        shares = [shard_range(11, parts, part) for part in range(parts)]
        assert [item for share in shares for item in share] == list(range(11))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
