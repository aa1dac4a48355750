"""The advantage estimators: numbers worked out by hand, and what must hold for any rewards."""

import math
import re
from fractions import Fraction

import pytest
import torch
from helpers import ROOT
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rloo_pipeline import config
from rloo_pipeline.algorithm import advantages, nan_stats, shaping

NAN = float("nan")
E = nan_stats.STD_EPSILON
ALL = {name: getattr(advantages, name) for name in config.estimators()}
IN_GROUPS = {name: f for name, f in ALL.items() if not f.whitened and name not in config.estimators("batch_baseline")}
every = pytest.mark.parametrize("name", ALL)

# Rewards on a grid of quarters, so that sums are exact in double precision; NaN is unscorable.
values = st.one_of(st.integers(0, 16).map(lambda n: n / 4), st.just(NAN))
rewards_of = hnp.arrays("float64", st.tuples(st.integers(1, 4), st.integers(2, 6)), elements=values).map(
    torch.from_numpy
)


def double(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


BY_HAND = {
    "rloo": [1 - 5 / 3, 0 - 6 / 3, 1 - 5 / 3, 4 - 2 / 3],
    # the others' sample deviations: of (0,1,4) √(13/3), of (1,1,4) √3, of (1,0,1) √(1/3)
    "rloo_std": [
        *[(1 - 5 / 3) / ((13 / 3) ** 0.5 + E), (0 - 2) / (3**0.5 + E)],
        *[(1 - 5 / 3) / ((13 / 3) ** 0.5 + E), (4 - 2 / 3) / ((1 / 3) ** 0.5 + E)],
    ],
    "grpo": [(r - 1.5) / (3**0.5 + E) for r in (1, 0, 1, 4)],
    "dr_grpo": [-0.5, -1.5, -0.5, 2.5],
    "reinforce_pp": [(r - 1.5) / (3**0.5 + E) for r in (1, 0, 1, 4)],
    "reinforce_pp_baseline": [(r - 1.5) / (3**0.5 + E) for r in (1, 0, 1, 4)],
    "maxrl": [(r - 1.5) / 1.5 for r in (1, 0, 1, 4)],
}


def test_the_configuration_knows_every_estimator_of_the_module() -> None:
    """It reads their names from the source, by the marks that it knows."""
    assert {name for name, one in vars(advantages).items() if isinstance(one, advantages.Estimator)} == ALL.keys()


def test_values_that_differ_by_rounding_are_merged_and_no_others() -> None:
    rows = double([[0.3, 0.1 + 0.2, NAN, 0.2], [1e9, 1e9 + 1e-6, 1e9 + 1, NAN], [0.0, 1e-300, -1e-300, 1.0]])
    merged = nan_stats.merged(rows)
    expected = double([[0.3, 0.3, NAN, 0.2], [1e9, 1e9, 1e9 + 1, NAN], [-1e-300, -1e-300, -1e-300, 1.0]])
    torch.testing.assert_close(merged, expected, rtol=0, atol=0, equal_nan=True)
    distinct = torch.rand(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(nan_stats.merged(distinct), distinct)


@every
def test_one_group_by_hand(name) -> None:
    torch.testing.assert_close(ALL[name](double([[1, 0, 1, 4]])), double([BY_HAND[name]]))


def test_every_estimator_is_worked_out_by_hand_here_and_has_its_formula_in_the_docs() -> None:
    assert BY_HAND.keys() == ALL.keys()
    table = (ROOT / "docs" / "algorithms.md").read_text().partition("| `advantage` | formula |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == ALL.keys()


def test_the_example_of_an_estimator_in_contributing_is_one() -> None:
    example = (ROOT / "CONTRIBUTING.md").read_text().partition("```python\n")[2].partition("```")[0]
    names = dict(vars(advantages))
    exec(example, names)
    torch.testing.assert_close(names["reinforce"](double([[1, 0, 1, 4]])), double([[-0.5, -1.5, -0.5, 2.5]]))
    assert (names["reinforce"](torch.full((3, 4), 0.1)) == 0).all(), "equal rewards teach nothing, at any size"


def test_reinforce_pp_standardizes_over_the_batch_and_its_baseline_is_the_group() -> None:
    rewards = double([[1, 0], [5, 3]])
    torch.testing.assert_close(advantages.reinforce_pp(rewards), (rewards - 2.25) / (rewards.std() + E))
    centred = double([[0.5, -0.5], [1, -1]])
    torch.testing.assert_close(advantages.reinforce_pp_baseline(rewards), centred / (centred.std() + E))


def test_rloo_std_does_not_divide_by_siblings_that_are_all_equal() -> None:
    assert advantages.rloo_std(double([[1, 0, 0, 0]]))[0, 0] == 1


def test_dr_grpo_is_rloo_times_the_share_of_the_others() -> None:
    rewards = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(advantages.dr_grpo(rewards), advantages.rloo(rewards) * 3 / 4)


@every
def test_unscorable_samples_are_as_if_they_were_not_there(name) -> None:
    with_hole, without = double([[1.0, NAN, 0.0, 3.0]]), double([[1.0, 0.0, 3.0]])
    result = ALL[name](with_hole)
    assert result[0, 1] == 0
    torch.testing.assert_close(result[:, [0, 2, 3]], ALL[name](without))


@given(rewards_of)
def test_nothing_but_numbers_of_the_same_shape_comes_out(rewards) -> None:
    for name, estimator in ALL.items():
        result = estimator(rewards)
        assert result.shape == rewards.shape, name
        assert result.isfinite().all(), name
        assert (result[rewards.isnan()] == 0).all(), name


@given(rewards_of, st.randoms(use_true_random=False))
def test_samples_and_prompts_in_another_order_get_the_same_advantages(rewards, random) -> None:
    samples, prompts = list(range(rewards.shape[1])), list(range(rewards.shape[0]))
    random.shuffle(samples)
    random.shuffle(prompts)
    for name, estimator in ALL.items():
        there, here = estimator(rewards[prompts][:, samples]), estimator(rewards)[prompts][:, samples]
        torch.testing.assert_close(there, here, msg=lambda text, name=name: f"{name}: {text}")


@given(rewards_of, st.integers(-8, 8))
def test_a_shift_of_all_rewards_changes_nothing(rewards, shift) -> None:
    """But for MaxRL, which divides by the mean."""
    for estimator in [ALL[name] for name in ALL if name != "maxrl"]:
        torch.testing.assert_close(estimator(rewards + shift), estimator(rewards), atol=1e-9, rtol=1e-7)


@given(hnp.arrays("float64", (3, 2), elements=st.integers(0, 9)).map(torch.from_numpy))
def test_two_samples_get_opposite_advantages(rewards) -> None:
    for estimator in IN_GROUPS.values():
        result = estimator(rewards)
        torch.testing.assert_close(result[:, 0], -result[:, 1])


@given(rewards_of)
def test_the_advantages_of_a_group_sum_to_0(rewards) -> None:
    for name in ("rloo", "grpo", "dr_grpo", "maxrl"):
        total = ALL[name](rewards).sum(-1)
        torch.testing.assert_close(total, torch.zeros_like(total), atol=1e-9, rtol=0)


@given(rewards_of)
def test_one_scorable_sample_alone_teaches_nothing(rewards) -> None:
    rewards[:, 1:] = NAN
    for name, estimator in IN_GROUPS.items():
        assert estimator.formula(rewards).isnan().all(), name  # so it does not count in `normalize_advantages` either
        assert (estimator(rewards) == 0).all(), name


def test_the_configuration_knows_which_estimators_give_groups_of_equal_rewards_a_signal() -> None:
    found = {name for name, one in ALL.items() if advantages.has_batch_baseline(one.formula, 2)}
    assert found == set(config.estimators("batch_baseline")) >= {"reinforce_pp"}


def leave_one_out(row: list[float]) -> dict[str, list[float]]:
    """The estimators in rational numbers, from the list of the other samples; 0 where no advantage is defined."""
    by_estimator: dict[str, list[float]] = {name: [] for name in ("rloo", "rloo_std", "dr_grpo", "grpo")}
    for place, own in enumerate(row):
        others = [Fraction(r) for i, r in enumerate(row) if i != place and not math.isnan(r)]
        if math.isnan(own) or not others:
            for values in by_estimator.values():
                values.append(0.0)
            continue
        difference = Fraction(own) - sum(others) / len(others)
        centred = Fraction(own) - (sum(others) + Fraction(own)) / (len(others) + 1)
        spread = deviation(others)
        by_estimator["rloo"].append(float(difference))
        by_estimator["rloo_std"].append(float(difference) / (spread + E if spread else 1.0))
        by_estimator["dr_grpo"].append(float(centred))
        by_estimator["grpo"].append(float(centred) / (deviation([*others, Fraction(own)]) + E))
    return by_estimator


def deviation(values: list[Fraction]) -> float:
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else 0.0


sizes = st.tuples(st.sampled_from([-1.0, 1.0]), st.floats(1e-3, 1e6)).map(math.prod)
of_dtypes = pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])


@of_dtypes
@given(sizes, sizes, st.integers(1, 7), st.integers(0, 3), st.data())
def test_a_sample_among_equal_siblings_of_any_size_has_the_advantage_of_exact_arithmetic(
    dtype, rtol, own, sibling, siblings, unscorable, data
) -> None:
    row = data.draw(st.permutations([own, *[sibling] * siblings, *[NAN] * unscorable]))
    rewards = torch.tensor([row], dtype=dtype)
    for name, expected in leave_one_out(rewards[0].tolist()).items():
        torch.testing.assert_close(ALL[name](rewards), torch.tensor([expected], dtype=dtype), rtol=rtol, atol=0)


@of_dtypes
@given(sizes, st.lists(st.one_of(st.integers(-9, 9), st.just(NAN)), min_size=2, max_size=8))
def test_rewards_far_from_0_have_the_advantages_of_exact_arithmetic(dtype, rtol, offset, steps) -> None:
    """Steps of a size that float32 still tells apart at the offset."""
    rewards = torch.tensor([[offset + step * max(1.0, abs(offset) / 64) for step in steps]], dtype=dtype)
    for name, exact in leave_one_out(rewards[0].tolist()).items():
        expected = torch.tensor([exact], dtype=dtype)
        small = rtol * 1e-2 * float(expected.abs().max())
        torch.testing.assert_close(ALL[name](rewards), expected, rtol=rtol, atol=small)


@of_dtypes
@given(sizes, st.integers(2, 9))
def test_equal_rewards_of_any_size_come_to_exactly_0(dtype, rtol, reward, samples) -> None:
    for function in ALL.values():
        assert (function(torch.full((3, samples), reward, dtype=dtype)) == 0).all(), function
    rewards = torch.full((samples,), reward, dtype=dtype)
    assert (nan_stats.whiten(rewards) == 0).all()
    moments = shaping.Moments().add(rewards, rewards).add(rewards, rewards)
    assert (moments.standardize(rewards.double()) == 0).all()


@given(sizes, st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=9), min_size=1, max_size=4))
def test_running_moments_far_from_0_are_those_of_exact_arithmetic(offset, rounds) -> None:
    assume(sum(map(len, rounds)) > 1)
    batches = [[offset + step * max(1.0, abs(offset) / 64) for step in steps] for steps in rounds]
    moments = shaping.Moments()
    for batch in batches:
        moments = moments.add(*[torch.tensor(batch, dtype=torch.float64)] * 2)
    values = [Fraction(value) for batch in batches for value in batch]
    assert moments.mean == pytest.approx(float(sum(values) / len(values)))
    std = math.sqrt(moments.squares / (moments.number - 1))
    assert std == pytest.approx(deviation(values), rel=1e-9, abs=1e-12 * abs(offset))


@pytest.mark.parametrize("sibling", [0.1 + 0.2, 0.3])
def test_siblings_that_differ_by_the_rounding_of_a_sum_are_equal(sibling) -> None:
    rewards = double([[1.3, 0.3, sibling, 0.3]])
    assert advantages.rloo_std(rewards)[0, 0].item() == pytest.approx(1.0)
    assert not nan_stats.teaching(rewards[:, 1:], torch.ones(1, 3, dtype=torch.bool)).any()


@pytest.mark.parametrize("name", ["rloo", "grpo", "reinforce_pp_baseline"])
def test_standardized_over_the_round_equal_rewards_still_have_advantages_of_exactly_0(name) -> None:
    """The mean that is subtracted is 0 but for rounding; its sign would decide which ratios count as clipped."""
    rewards = double([[0.1, 1.1, 0.0, 1.0], [1.1, 0.1, 0.1, 0.0], [1.0, 0.0, 0.1, 1.1], [1.0, 1.0, 1.0, 1.0]])
    whitened = nan_stats.whiten(ALL[name].formula(rewards))
    assert (whitened[3] == 0).all()
    assert (whitened[:3] != 0).all()


def test_groups_of_equal_or_lone_rewards_teach_nothing() -> None:
    rewards = double([[1, 1, 1], [1, 0, NAN], [1, 1, NAN], [1, NAN, NAN], [NAN, NAN, NAN], [0, 1, 1]])
    teaches = nan_stats.teaching(rewards, torch.ones(6, 3, dtype=torch.bool))
    assert teaches.tolist() == [False, True, False, False, False, True]
    assert nan_stats.first_teaching(teaches, 2) == [1, 5]
    assert nan_stats.first_teaching(teaches, 4) == [0, 1, 2, 5]


def test_a_group_teaches_by_what_is_in_the_loss() -> None:
    """The first has no loss at all, the second none but on the sample at the mean, the third on one that is not."""
    rewards = double([[0, 1, 2], [0.1, 0.2, 0.3], [0, 1, 2]])
    in_loss = torch.tensor([[False, False, False], [False, True, False], [True, False, False]])
    assert nan_stats.teaching(rewards, in_loss).tolist() == [False, False, True]


@pytest.mark.parametrize("largest", [16, 4])
@given(st.data())
def test_a_group_teaches_exactly_where_an_advantage_is_not_0(largest, data) -> None:
    """MaxRL takes rewards up to 1."""
    rewards = data.draw(rewards_of).clamp(max=largest / 4)
    teaching = nan_stats.teaching(rewards, torch.ones_like(rewards, dtype=torch.bool))
    for name in [name for name in IN_GROUPS if name != "maxrl" or largest == 4]:
        assert torch.equal((IN_GROUPS[name](rewards).abs() > 1e-12).any(-1), teaching), name


@given(rewards_of)
def test_the_whitened_batch_has_mean_0_and_deviation_1(rewards) -> None:
    whitened = nan_stats.whiten(rewards)
    scorable = whitened[~whitened.isnan()]
    assert torch.equal(whitened.isnan(), rewards.isnan())
    assume(len(scorable) > 1 and rewards[~rewards.isnan()].std() > 0)
    assert scorable.mean().item() == pytest.approx(0, abs=1e-9)
    assert scorable.std().item() == pytest.approx(1, rel=1e-3)
