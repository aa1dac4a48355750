"""Which training prompts a round gets, from tables of pass rates that make a mistake visible."""

from collections import Counter
from math import comb
from pathlib import Path
from typing import Any

import pytest
from helpers import mini, write_prompts

from rloo_pipeline.artifacts import prompt_counts
from rloo_pipeline.artifacts.prompt_counts import Counts
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import STAGES, Config
from rloo_pipeline.data.prompts_of_round import after_round, draw, prompts_of_round, uncertainty
from rloo_pipeline.errors import UserError
from rloo_pipeline.seeds import rows_of_round

NAMES = [f"p{number:02d}" for number in range(40)]
RIGHT = {name: float(number % 9) for number, name in enumerate(NAMES)}
"""Right completions of 8: 0 to 8 in turn."""


@pytest.fixture
def train(tmp_path) -> PromptSet:
    write_prompts(tmp_path / "prompts", [{"prompt_id": name, "prompt": name, "prompt_ids": [5]} for name in NAMES])
    return PromptSet(tmp_path / "prompts" / "train")


@pytest.fixture
def shards(tmp_path) -> list[Path]:
    """Pass rates of policy 0, in two shards."""
    files = [tmp_path / f"difficulty-{shard}.parquet" for shard in range(2)]
    for shard, file in enumerate(files):
        own = NAMES[20 * shard : 20 * (shard + 1)]
        prompt_counts.write(file, {name: Counts(RIGHT[name], 8.0) for name in own}, 0, shard=shard, policy="0")
    return files


def config_of(select: dict | None, **rollout) -> Config:
    sizes = {"generation_batch_size": 32, "num_generations": 4, "shards": 2} | rollout
    return Config(**mini(dataset={"select": select}, rollout=sizes, correct={"reward": "answer"}))


def names(config: Config, train: PromptSet, number: int, *files: Any) -> list[str]:
    return [NAMES[row] for row in prompts_of_round(config, train, number, *files).sampled]


def test_without_a_selection_each_prompt_comes_once_an_epoch(train) -> None:
    config = config_of(None)
    rounds = [names(config, train, number) for number in range(1, 6)]
    assert sorted(name for one in rounds for name in one) == NAMES


def test_without_shuffling_rounds_take_the_rows_in_their_order_and_refills_the_next_ones(train, shards) -> None:
    sizes = {"generation_batch_size": 48, "num_generations": 4, "shards": 2}
    config = Config(**mini(dataset={"shuffle_dataset": False}, rollout=sizes))
    rounds = [prompts_of_round(config, train, number) for number in range(1, 12)]
    assert [row for one in rounds for row in one.sampled] == [row % 40 for row in range(11 * 12)]
    assert rounds[3].sampled + rounds[3].spare == [*range(36, 40), *range(36)]
    select = {"pass_rate": [0.125, 0.5]}
    config = Config(**mini(dataset={"shuffle_dataset": False, "select": select}, correct={"reward": "answer"}))
    in_range = [row for row, name in enumerate(NAMES) if 1 <= RIGHT[name] <= 4]
    assert prompts_of_round(config, train, 1, shards).sampled == in_range[: config.rollout.num_prompts]


def test_the_order_of_the_rows_decides_rollouts_alone_and_cannot_be_drawn_by_weights() -> None:
    shuffled, ordered = (Config(**mini(dataset={"shuffle_dataset": flag})) for flag in (True, False))
    changed = {stage for stage in STAGES if shuffled.params(stage) != ordered.params(stage)}
    assert changed == {"rollout", "refill"}
    drawn = {"shuffle_dataset": False, "select": {"weights": "online"}}
    with pytest.raises(ValueError, match=r"select.weights: online cannot be used with shuffle_dataset: false"):
        Config(**mini(dataset=drawn, correct={"reward": "answer"}))


def test_a_range_of_pass_rates_is_a_filter_with_both_ends(train, shards) -> None:
    config = config_of({"pass_rate": [0.125, 0.5]})
    in_range = [name for name in NAMES if 1 <= RIGHT[name] <= 4]
    count = len(in_range) // 8 + 1
    drawn = [name for number in range(1, count + 1) for name in names(config, train, number, shards)]
    assert set(drawn) == set(in_range)
    assert max(Counter(drawn).values()) <= 2, "each is used once before any is used again"


def test_a_range_that_leaves_too_few_prompts_gives_a_one_line_error(train, shards) -> None:
    with pytest.raises(UserError) as refused:
        prompts_of_round(config_of({"pass_rate": [0.75, 0.875]}, generation_batch_size=48), train, 1, shards)
    assert str(refused.value) == (
        "dataset.select.pass_rate: 8 of 40 training prompts have a pass rate of policy 0 from 0.75 to 0.875 (28 are "
        "below, 4 above, 0 have none), but a round needs 12; widen the range, or lower rollout.generation_batch_size"
    )


def test_a_prompt_without_a_scored_completion_is_in_no_range(train, shards) -> None:
    counts = {name: Counts(4.0, 8.0) if number < 16 else Counts() for number, name in enumerate(NAMES)}
    for shard, file in enumerate(shards):
        own = {name: counts[name] for name in NAMES[20 * shard : 20 * (shard + 1)]}
        prompt_counts.write(file, own, 0, shard=shard, policy="0")
    config, files = config_of({"pass_rate": [0, 1]}), shards
    assert {*names(config, train, 1, files), *names(config, train, 2, files)} == set(NAMES[:16])
    with pytest.raises(UserError, match=r"16 of 40 .* \(0 are below, 0 above, 24 have none\)"):
        prompts_of_round(config_of({"pass_rate": [0, 1]}, generation_batch_size=160), train, 1, files)
    for shard, file in enumerate(shards):
        unscored = dict.fromkeys(NAMES[20 * shard : 20 * (shard + 1)], Counts())
        prompt_counts.write(file, unscored, 0, shard=shard, policy="0")
    with pytest.raises(UserError, match=r"no prompt has a pass rate, because the reward in correct\.reward scored no"):
        prompts_of_round(config_of({"weights": "static"}), train, 1, files)


def test_a_table_of_another_round_shard_or_dataset_is_refused(train, shards, tmp_path) -> None:
    config = config_of({"pass_rate": [0, 1], "weights": "online"})
    with pytest.raises(UserError, match=r"dataset\.select needs all 2"):
        prompts_of_round(config, train, 1, shards[:1])
    with pytest.raises(UserError, match=r"difficulty-1.parquet: .*shard.*delete it"):
        prompts_of_round(config, train, 1, shards[::-1])
    with pytest.raises(UserError, match=r"--pass-rates: .* needs the table of round 1"):
        prompts_of_round(config, train, 2, shards)
    late = tmp_path / "late.parquet"
    prompt_counts.write(late, {}, 2, shard=0)
    with pytest.raises(UserError, match=r"late\.parquet: .*round.*delete it and run again"):
        prompts_of_round(config, train, 2, shards, late)
    prompt_counts.write(shards[1], {"other": Counts(1.0, 8.0)}, 0, shard=1, policy="0")
    with pytest.raises(UserError, match=r"no pass rate of the training prompt p20; delete it and run again"):
        prompts_of_round(config, train, 1, shards)


def test_with_a_lag_a_round_sees_the_scores_that_its_policy_was_made_from(train, tmp_path) -> None:
    """Round 3 with a lag of 1 samples from policy 1: the table of round 1 counts, and that of round 2 is refused."""
    config = config_of({"weights": "online"}, lag=1)
    tables = {}
    for number, uncertain in ((1, set(NAMES[:20])), (2, set(NAMES[20:]))):
        tables[number] = tmp_path / f"{number}.parquet"
        counts = {name: Counts(5e8 if name in uncertain else 0.0, 1e9) for name in NAMES}
        prompt_counts.write(tables[number], counts, number, shard=0)
    assert set(names(config, train, 3, (), tables[1])) <= set(NAMES[:20])
    assert set(names(config, train, 4, (), tables[2])) <= set(NAMES[20:])
    with pytest.raises(UserError, match=r"2\.parquet: .*round"):
        prompts_of_round(config, train, 3, (), tables[2])
    early = [names(config, train, number) for number in (1, 2)]
    assert early[0] != early[1], "both from policy 0, by draws of their own"


def test_weights_are_the_expected_variance_of_a_reward() -> None:
    """Against the sum over a fine grid of p, by the definition of the posterior."""
    for right, samples in ((0, 0), (0, 8), (3, 8), (8, 8)):
        grid = [(place + 0.5) / 10_000 for place in range(10_000)]
        likelihoods = [comb(samples, right) * p**right * (1 - p) ** (samples - right) for p in grid]
        mean = sum(p * (1 - p) * one for p, one in zip(grid, likelihoods, strict=True)) / sum(likelihoods)
        assert uncertainty(Counts(right, samples)) == pytest.approx(mean, rel=1e-6)


def test_prompts_are_drawn_in_proportion_to_their_weights() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    firsts = Counter(draw(weights, 3, seed)[0] for seed in range(4000))
    assert {name: count / 4000 for name, count in firsts.items()} == pytest.approx(
        {"a": 1 / 8, "b": 2 / 8, "c": 5 / 8}, abs=0.025
    )
    pairs = Counter(frozenset(draw(weights, 2, seed)) for seed in range(4000))
    without_a = 2 / 8 * 5 / 6 + 5 / 8 * 2 / 3  # b then c, or c then b
    assert pairs[frozenset("bc")] / 4000 == pytest.approx(without_a, abs=0.025)


def test_a_draw_has_no_prompt_twice_and_does_not_depend_on_order_or_on_other_prompts() -> None:
    weights = {name: 0.1 + RIGHT[name] for name in NAMES}
    drawn = draw(weights, 12, 3)
    assert len(set(drawn)) == 12
    assert draw(dict(reversed(weights.items())), 12, 3) == drawn
    fewer = {name: weight for name, weight in weights.items() if name not in drawn[:2]}
    assert draw(fewer, 10, 3) == drawn[2:]
    assert draw(weights, 12, 4) != drawn


@pytest.mark.parametrize("weights", ["none", "static"])
def test_a_refill_takes_the_prompts_that_may_be_trained_on_and_were_not_sampled(train, shards, weights) -> None:
    config = config_of({"pass_rate": [0.1, 0.9], "weights": weights})
    chosen = prompts_of_round(config, train, 2, shards)
    in_range = [row for row, name in enumerate(NAMES) if 1 <= RIGHT[name] <= 7]
    assert len(chosen.sampled) == 8
    assert sorted(chosen.sampled + chosen.spare) == in_range
    assert chosen.spare != sorted(chosen.spare)


def test_certain_prompts_are_rare_and_filtered_ones_never_come(train, shards) -> None:
    config = config_of({"pass_rate": [0.0, 0.9], "weights": "static"})
    drawn = Counter(name for number in range(1, 301) for name in names(config, train, number, shards))
    assert not any(drawn[name] for name in NAMES if RIGHT[name] == 8)
    by_right = {right: [drawn[name] for name in NAMES if RIGHT[name] == right] for right in range(8)}
    assert max(by_right[0]) < min(by_right[4]), "never solved against solved half of the time"
    assert min(by_right[0]) > 0


def test_counts_after_a_round_by_hand() -> None:
    before = {"b": Counts(4.0, 8.0), "c": Counts(1.0, 8.0)}
    after = after_round(before, {"b": Counts(0.0, 4.0), "a": Counts(3.0, 4.0)})
    assert list(after.items()) == [("a", Counts(3.0, 4.0)), ("b", Counts(2.0, 8.0)), ("c", Counts(1.0, 8.0))]


def test_filtered_epochs_are_those_of_the_kept_prompts(train, shards) -> None:
    """The same order as a dataset of the kept rows alone would have, whatever the shards."""
    from rloo_pipeline.seeds import derive

    in_range = [name for name in NAMES if RIGHT[name] in (2, 3, 4, 5)]
    for number in (1, 2, 3):
        rows = rows_of_round(len(in_range), 8, number, derive(1, "prompts"))
        config = config_of({"pass_rate": [0.25, 0.7]})
        assert names(config, train, number, shards) == [in_range[row] for row in rows]
