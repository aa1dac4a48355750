"""Intervals have their coverage and tests their size."""

from itertools import combinations, product

import numpy as np
import pytest
from scipy.special import betaln
from scipy.stats import beta, binomtest, ttest_rel

from rloo_pipeline.checks.statistics import (
    estimate_mean,
    estimate_scores,
    estimate_share,
    gain,
    holm,
    informative,
    pass_at_k,
    samples_each,
    share_difference,
    sign_flip_p,
)

DRAW = np.random.default_rng(7)
BEFORE = (DRAW.random(400) < 0.4).astype(float)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    for right in range(7):
        subsets = list(combinations([1] * right + [0] * (6 - right), 3))
        assert pass_at_k(6, right, 3) == pytest.approx(sum(max(subset) for subset in subsets) / len(subsets))


def test_rewards_that_differ_by_the_rounding_of_their_sum_are_equal() -> None:
    assert informative(np.array([[0.1 + 0.2, 0.3], [1.0, 0.0], [np.nan, 1.0], [np.nan, np.nan]])) == 0.25


def test_zero_right_answers_have_the_interval_of_a_share() -> None:
    """0 of 200: with the largest such share, 1 − 0.025^(1/200), no answer is right in 2.5% of cases."""
    low, high = estimate_share(np.zeros(200), 1).ci95 or (1, 1)
    assert (low, high) == (0.0, pytest.approx(1 - 0.025 ** (1 / 200)))
    low, high = estimate_share(np.ones(200), 4).ci95 or (1, 1)
    assert (low, high) == (pytest.approx(0.025 ** (1 / 200)), 1.0)
    nothing = gain(np.zeros(200), np.zeros(200), 1000, 1, samples=1)
    assert (nothing.p, nothing.ci95) == (1.0, pytest.approx((-0.0183, 0.0183), abs=1e-4))


@pytest.mark.parametrize("prompts", [5, 20, 100, 1000])
@pytest.mark.parametrize("right", [0, 1, 3, 5])
def test_with_one_sample_a_prompt_the_interval_is_that_of_clopper_and_pearson(prompts: int, right: int) -> None:
    expected = binomtest(right, prompts).proportion_ci()
    assert estimate_share(np.arange(prompts) < right, 1).ci95 == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize("samples", [3, 10])
def test_prompts_of_equal_shares_count_as_one_answer_each_whatever_their_mean_rounds_to(samples: int) -> None:
    for prompts, right in product(range(1, 30), range(1, samples)):
        n, p = prompts, right / samples
        expected = beta.ppf(0.025, n * p, n * (1 - p) + 1), beta.ppf(0.975, n * p + 1, n * (1 - p))
        assert estimate_share(np.full(prompts, p), samples).ci95 == pytest.approx(expected), (prompts, right)


DRAWS, MIN_COVERAGE = 400, 0.915
"""Number of simulations, and a coverage below which a true 95% interval falls once in 1,000 times."""


@pytest.mark.parametrize("prompts", [5, 20, 200, 1000])
def test_the_intervals_of_shares_have_their_coverage(prompts: int) -> None:
    """For samples of a prompt that are independent (0), correlated (0.5) or identical (1)."""
    for rate, samples, correlation in product([0, 0.01, 0.5, 0.99], [1, 4, 16], [0, 0.5, 1]):
        draw = np.random.default_rng([prompts, samples])
        values = shares(draw, rate, (DRAWS, prompts), samples, correlation)
        intervals = np.array([estimate_share(row, samples).ci95 for row in values])
        coverage = ((intervals[:, 0] <= rate) & (rate <= intervals[:, 1])).mean()
        assert coverage >= MIN_COVERAGE, (rate, samples, correlation)


@pytest.mark.parametrize("prompts", [5, 20, 200, 1000])
def test_the_intervals_of_gains_in_shares_have_their_coverage(prompts: int) -> None:
    for samples in (1, 4):
        draw = np.random.default_rng([prompts, samples])
        before, after = (
            {rate: shares(draw, rate, (DRAWS, prompts), samples, 0.5) for rate in rates}
            for rates in ((0, 0.01, 0.5, 0.99), (0.01, 0.5, 0.95))
        )
        for before_rate, after_rate in product(before, after):
            rows = after[after_rate] - before[before_rate]
            intervals = np.array([share_difference(row, samples).ci95 for row in rows])
            coverage = (
                (intervals[:, 0] <= after_rate - before_rate) & (after_rate - before_rate <= intervals[:, 1])
            ).mean()
            assert coverage >= MIN_COVERAGE, (before_rate, after_rate, samples)


@pytest.mark.parametrize("prompts", [5, 20, 50])
def test_the_intervals_of_pass_at_k_have_their_coverage(prompts: int) -> None:
    """For values that hardly any prompt keeps from 1, and many almost reach."""
    for mean, k in ((0.5, 4), (0.9, 2), (0.9, 4)):
        draw = np.random.default_rng([prompts, k])
        of_count = np.array([pass_at_k(16, right, k) for right in range(17)])
        values = of_count[draw.binomial(16, draw.beta(mean, 1 - mean, (2000, prompts)))]
        truth = 1 - np.exp(betaln(mean, 1 - mean + k) - betaln(mean, 1 - mean))
        intervals = np.array([estimate_share(row, 16 // k).ci95 for row in values])
        coverage = ((intervals[:, 0] <= truth) & (truth <= intervals[:, 1])).mean()
        assert coverage >= 0.935, (mean, k, coverage)


@pytest.mark.parametrize(("prompts", "samples", "rate"), [(10, 4, 0.1), (50, 1, 0.1), (200, 4, 0.005)])
def test_the_intervals_of_rewards_with_two_values_have_their_coverage(prompts, samples, rate) -> None:
    """Rewards of −1 and 1, of which one is rare: Student's interval and the bootstrap's miss it in a tenth of cases."""
    draw = np.random.default_rng(prompts)
    own = draw.beta(3 * rate, 3 - 3 * rate, (DRAWS, prompts, 1))
    rewards = 1.0 - 2.0 * (draw.random((DRAWS, prompts, samples)) < own)
    intervals = [estimate.ci95 for table in rewards if (estimate := estimate_scores(table, 100, 1))]
    coverage = np.mean([low <= 1 - 2 * rate <= high for low, high in filter(None, intervals)])
    assert coverage >= MIN_COVERAGE


def test_rewards_with_two_values_are_shares_of_another_unit() -> None:
    before, after = np.array([0.0, 0.5, 0.5, 0.0, 0.75]), np.array([0.5, 0.75, 1.0, 0.0, 1.0])
    share, reward = gain(before, after, 100, 1, 4), gain(2 * before - 1, 2 * after - 1, 100, 1, 4, 2.0)
    assert (reward.value, reward.p) == (2 * share.value, share.p)
    assert reward.ci95 == pytest.approx((2 * share.ci95[0], 2 * share.ci95[1]))


@pytest.mark.parametrize("prompts", [5, 20, 200])
@pytest.mark.parametrize("name", ["normal", "exponential"])
def test_the_intervals_of_means_have_their_coverage(prompts: int, name: str) -> None:
    values = getattr(np.random.default_rng(prompts), name)(size=(DRAWS, prompts))
    intervals = np.array([estimate_mean(row, 400, place).ci95 for place, row in enumerate(values)])
    true = float(name == "exponential")
    coverage = ((intervals[:, 0] <= true) & (true <= intervals[:, 1])).mean()
    assert coverage >= MIN_COVERAGE


@pytest.mark.parametrize("prompts", [5, 10, 20, 100])
@pytest.mark.parametrize("kind", ["right or wrong", "shares of 4", "whole numbers"])
def test_a_true_null_is_rejected_in_at_most_5_percent_of_cases(prompts: int, kind: str) -> None:
    draw = np.random.default_rng(prompts)
    if kind == "whole numbers":
        differences = np.round(2 * draw.standard_t(3, size=(DRAWS, prompts)))
    else:
        samples = 1 if kind == "right or wrong" else 4
        differences = np.subtract(*(shares(draw, 0.3, (DRAWS, prompts), samples, 0.2) for _ in range(2)))
    rejected = np.mean([sign_flip_p(row, 400, place) <= 0.05 for place, row in enumerate(differences)])
    assert rejected <= 0.05 + 3.1 * (0.05 * 0.95 / DRAWS) ** 0.5


def shares(
    draw: np.random.Generator, rate: float, size: tuple[int, int], samples: int, correlation: float
) -> np.ndarray:
    """Shares of right samples per prompt; two samples of a prompt have the correlation `alike`."""
    if rate in (0, 1) or correlation == 0:
        own = np.full(size, float(rate))
    elif correlation == 1:
        own = (draw.random(size) < rate).astype(float)
    else:
        spread = 1 / correlation - 1
        own = draw.beta(rate * spread, (1 - rate) * spread, size)
    return draw.binomial(samples, own) / samples


def test_the_p_value_of_two_prompts_is_at_least_a_half() -> None:
    for samples in (1, None):
        paired = gain(np.zeros(2), np.ones(2), 1000, 1, samples)
        assert (paired.value, paired.p) == (1.0, 0.5)
    assert gain(np.zeros(2), np.array([0.3, 0.9]), 1000, 1).p == pytest.approx(0.5)


def test_the_test_is_exact_up_to_20_differences() -> None:
    differences = DRAW.normal(0.5, size=12)
    patterns = np.abs(np.array(list(product([-1, 1], repeat=12))) @ differences)
    expected = (patterns >= abs(differences.sum()) - 1e-9).mean()
    assert sign_flip_p(differences, 100, 1) == sign_flip_p(differences, 100, 2) == pytest.approx(expected)
    assert sign_flip_p(np.append(differences, np.zeros(500)), 100, 1) == pytest.approx(expected)


@pytest.mark.parametrize("unit", [1e-11, 1e-6, 1e6])
def test_the_p_value_does_not_depend_on_the_unit_of_the_reward(unit: float) -> None:
    """A reward such as a negative squared error can be tiny; p was 0 where rounding lost the observed pattern."""
    better = np.abs(np.random.default_rng(1).normal(3, 1, 12))
    assert sign_flip_p(better * unit, 100, 1) == pytest.approx(2 / 2**12)
    assert gain(np.zeros(12), better * unit, 100, 1).p == pytest.approx(2 / 2**12)


def test_for_right_or_wrong_prompts_the_test_is_mcnemars() -> None:
    differences = np.repeat([1.0, -1.0, 0.0], [60, 35, 905])
    assert sign_flip_p(differences, 100, 1) == pytest.approx(binomtest(60, 95).pvalue)


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("samples", [1, None])
def test_the_p_value_is_close_to_that_of_a_paired_test(shift: float, samples: int | None) -> None:
    """The differences of 400 prompts are close enough to normal for the t-test to agree."""
    after = np.clip(BEFORE + (DRAW.random(400) < shift), 0, 1) - (DRAW.random(400) < 0.1) * BEFORE
    noise = 0.0 if samples else DRAW.normal(0, 0.1, 400)
    paired = gain(BEFORE, after + noise, 20_000, 1, samples)
    expected = ttest_rel(after + noise, BEFORE)
    assert paired.value == pytest.approx(float(np.mean(after + noise - BEFORE)))
    if samples is None:  # for values of 0 and 1 it is exact
        assert paired.p == pytest.approx(float(expected.pvalue), abs=0.02)
    low, high = paired.ci95 or (0, 0)
    interval = expected.confidence_interval()
    assert (low, high) == pytest.approx((interval.low, interval.high), abs=0.01)


def test_a_p_value_is_never_0_and_the_same_at_each_call() -> None:
    before, after = np.zeros(60), DRAW.normal(5, 1, 60)
    assert gain(before, after, 999, 1).p == 1 / 1000
    assert gain(before, after, 999, 1) == gain(before, after, 999, 1)


@pytest.mark.parametrize("samples", [1, None])
def test_an_interval_that_excludes_0_has_a_p_below_5_percent(samples: int | None) -> None:
    excluding = 0
    for prompts in (3, 5, 6, 12):
        for won in range(prompts + 1):
            after = (np.arange(prompts) < won) * (1.0 if samples else 1.0 + np.arange(prompts) / 9)
            paired = gain(np.zeros(prompts), after, 500, 1, samples)
            if paired.ci95 is not None and not paired.ci95[0] <= 0 <= paired.ci95[1]:
                excluding += 1
                assert paired.p is not None
                assert paired.p < 0.05
    assert excluding > 0


def test_scores_with_two_values_are_shares_and_others_means() -> None:
    scores = np.array([[0.0, 1.0], [1.0, np.nan], [np.nan, np.nan], [0.0, 0.0]])
    assert estimate_scores(scores, 100, 1) == estimate_share(np.array([0.5, 1.0, 0.0]), 2)
    assert estimate_scores(scores * 2 - 1, 100, 1).ci95 == pytest.approx(
        [2 * end - 1 for end in estimate_share(np.array([0.5, 1.0, 0.0]), 2).ci95]
    )
    assert estimate_scores(np.array([[24.0, np.nan, 25.0]]), 100, 1) == (24.5, None), "two lengths are not all lengths"
    assert estimate_scores(np.array([[0.0, np.nan, 1.0]]), 100, 1) == estimate_share(np.array([0.5]), 3)
    third = np.where(np.isnan(scores), 0.5, scores)
    assert estimate_scores(third, 100, 1) == estimate_mean(np.array([0.5, 0.75, 0.5, 0.0]), 100, 1)
    assert estimate_scores(scores * 0, 100, 1) == (0.0, None), "equal scores say nothing about the spread"
    assert estimate_scores(scores * np.nan, 100, 1) is None
    sums, expected = np.array([0.1 + 0.2, *[0.3] * 3, *[0.0] * 46]), binomtest(4, 50).proportion_ci()
    assert estimate_scores(sums[:, None], 100, 1).ci95 == pytest.approx((0.3 * expected.low, 0.3 * expected.high))


def test_completions_without_a_score_do_not_make_a_mean_surer() -> None:
    scores = np.array([[1.0, 1.0], [0.0, 0.0], *[[1.0, 0.0]] * 28])
    with_none = np.hstack([scores, np.full((30, 3), np.nan)])
    assert estimate_scores(with_none, 100, 0) == estimate_scores(scores, 100, 0)
    with_none[0, 2:] = 1.0
    assert samples_each(scores, with_none) == pytest.approx(60 / (59 / 2 + 1 / 5))
    assert samples_each(scores[:0]) == 1


def test_sums_in_another_order_do_not_differ() -> None:
    before = np.array([[0.1, 0.2, 0.3], [0.7, 0.1, 0.6]]).repeat(10, axis=0)
    after = before[:, ::-1]
    assert (before.mean(axis=1) != after.mean(axis=1)).any(), "rounding makes the sums differ"
    paired = gain(before.mean(axis=1), after.mean(axis=1), 100, 1)
    assert (paired.value, paired.p, paired.ci95) == (0.0, 1.0, None)
    assert estimate_mean(np.array([0.1 + 0.2, 0.3] * 5), 100, 1).ci95 is None


@pytest.mark.parametrize("samples", [3, None])
def test_differences_that_cancel_have_a_mean_of_0(samples: int | None) -> None:
    before, after = np.array([1, 2, 3, 1, 0, 2]) / 3, np.array([2, 1, 1, 2, 1, 2]) / 3
    assert (after - before).mean() != 0
    assert gain(before, after, 100, 1, samples)[::2] == (0.0, 1.0)


def test_holm_multiplies_the_smallest_by_all_and_each_further_one_by_one_less() -> None:
    corrected = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": None, "e": 0.5})
    assert corrected == {"a": 0.04, "b": 0.09, "c": 0.09, "d": None, "e": 0.5}
    assert holm({"a": 0.4, "b": 0.9}) == {"a": 0.8, "b": 0.9}


def test_prompts_without_a_value_for_one_policy_are_left_out() -> None:
    paired = gain(np.array([0.0, np.nan, 1.0]), np.array([1.0, 1.0, np.nan]), 100, 1)
    assert (paired.value, paired.prompts) == (1.0, 1)
    assert gain(np.array([np.nan]), np.array([1.0]), 100, 1).value is None
