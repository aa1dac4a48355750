"""Seeds and shares depend on what they are for and on nothing else."""

from rloo_pipeline.seeds import cut, derive, permutation, rows_of_round


def test_a_seed_depends_on_every_name_and_on_where_one_ends() -> None:
    made = {
        derive(0, "a", "bc"),
        derive(0, "ab", "c"),
        derive(1, "a", "bc"),
        derive(0, "a", "bc", 0),
        derive(0, "a", "bc", 1),
    }
    assert len(made) == 5
    assert all(0 <= seed < 2**63 for seed in made)
    assert derive(7, "round", 1, "x", 3) == derive(7, "round", 1, "x", 3)


def test_seeds_are_the_same_in_every_version() -> None:
    assert derive(0, "round", 1, "prompt", 0) == 5258308049371054456
    assert permutation(5, 1) == [2, 3, 4, 0, 1]


def test_an_epoch_uses_each_row_once_and_a_round_none_twice() -> None:
    rounds = [rows_of_round(10, 3, number, seed=5) for number in range(1, 7)]
    assert len({row for rows in rounds[:3] for row in rows}) == 9
    assert all(len(set(rows)) == 3 for rows in rounds)
    assert rounds[0] != rounds[3]


def test_shares_cover_everything_in_order() -> None:
    for parts in range(1, 6):
        shares = [cut(11, parts, part) for part in range(parts)]
        assert [item for share in shares for item in share] == list(range(11))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
