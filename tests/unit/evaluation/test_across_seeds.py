"""Statistics over seeds: by hand, against scipy, and by simulation."""

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, norm, t, ttest_1samp

from rloo_pipeline.evaluation.across_seeds import chance_ci95, compare_arms, seeds_needed, summarize_arm


def trainings(draw, seeds: int, prompts: int, mean: float, between: float) -> np.ndarray:
    """Right or wrong answers [seeds, prompts]: prompts differ in difficulty, seeds in their level."""
    difficulty = draw.normal(0, 0.15, prompts)
    level = draw.normal(mean, between, (seeds, 1))
    return (draw.random((seeds, prompts)) < np.clip(level + difficulty, 0, 1)).astype(float)


@pytest.mark.parametrize(("seeds", "between"), [(3, 0.05), (5, 0.05), (5, 0.0), (10, 0.05)])
def test_intervals_contain_the_truth_in_19_of_20_experiments(seeds, between) -> None:
    """Clopper and Pearson: of 400 experiments with 95%, fewer than 368 have a chance of 0.2%."""
    draw = np.random.default_rng(seeds)
    hits = np.zeros(2)
    for number in range(400):
        arm = summarize_arm(trainings(draw, seeds, 150, 0.5, between), 300, number)
        hits += [low <= 0.5 <= high for low, high in (arm.mean.ci95, arm.iqm.ci95)]
    assert (hits >= 368).all(), hits / 400


def test_of_equal_arms_one_in_twenty_differs() -> None:
    draw = np.random.default_rng(0)
    tables = [(trainings(draw, 5, 100, 0.6, 0.05), trainings(draw, 5, 100, 0.6, 0.05)) for _ in range(300)]
    ps = [compare_arms(*pair, 20, 0).p for pair in tables]
    assert np.mean(np.array(ps) < 0.05) <= 0.07


def test_numbers_by_hand() -> None:
    levels = np.array([0.2, 0.4, 0.5, 0.9])
    arm = summarize_arm(np.repeat(levels[:, None], 4, axis=1), 100, 0)
    assert arm.mean.value == pytest.approx(0.5)
    assert arm.iqm.value == pytest.approx(0.45), "the middle two of four"
    values, others = np.array([[0.9], [0.8], [0.7]]), np.array([[0.5], [0.8], [0.75]])
    compared = compare_arms(values, others, 100, 0)
    assert compared.value == pytest.approx(0.35 / 3)
    u = mannwhitneyu(values.ravel(), others.ravel()).statistic
    assert compared.improvement == pytest.approx(u / 9)
    assert compared.p == pytest.approx(ttest_1samp((values - others).ravel(), 0).pvalue)


@pytest.mark.parametrize("shift", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_intervals_of_the_chance_to_improve_contain_the_truth_in_19_of_20_experiments(seeds, shift) -> None:
    """With the bounds of the test above; levels of trainings are normal, so the truth is known."""
    draw = np.random.default_rng(seeds)
    truth, hits = norm.cdf(shift / np.sqrt(2)), 0
    for _ in range(400):
        better = draw.normal(shift, 1, (seeds, 1)) > draw.normal(0, 1, seeds)
        low, high = chance_ci95(float(better.mean()), seeds)
        hits += low <= truth <= high
    assert hits >= 368, hits / 400


def test_where_all_seeds_seen_are_better_the_chance_to_improve_is_not_certain() -> None:
    levels = np.array([[0.5], [0.6], [0.7]]).repeat(4, axis=1)
    better, worse = compare_arms(levels + 0.25, levels, 100, 0), compare_arms(levels, levels + 0.25, 100, 0)
    assert (better.improvement, worse.improvement) == (1.0, 0.0)
    assert better.improvement_ci95 == (pytest.approx(0.3366, abs=1e-4), 1.0)
    assert worse.improvement_ci95 == (0.0, pytest.approx(0.6634, abs=1e-4))
    assert chance_ci95(1.0, 10)[0] > chance_ci95(1.0, 5)[0] > better.improvement_ci95[0], "more seeds say more"
    low, high = chance_ci95(7 / 9, 3)
    for end in (low, high):  # the equation in the paper, by hand
        spread = end * (1 - end) * (1 + 2 * (1 - end) / (2 - end) + 2 * end / (1 + end)) / 9
        assert abs(7 / 9 - end) == pytest.approx(t.ppf(0.975, 4) * np.sqrt(spread))


def test_the_interval_of_a_difference_is_that_of_the_differences() -> None:
    values = trainings(np.random.default_rng(1), 4, 30, 0.5, 0.05)
    by_itself, from_zero = summarize_arm(values, 200, 7), compare_arms(values, np.zeros_like(values), 200, 7)
    assert from_zero.ci95 == pytest.approx(by_itself.mean.ci95)
    assert compare_arms(values, values, 200, 7).ci95 == (0.0, 0.0)


def test_the_interval_of_a_share_ends_at_all_and_at_none() -> None:
    levels = np.array([0.7, 0.9, 0.98])
    for shares, at_end in (
        (levels, lambda interval: interval[1] == 1.0),
        (1 - levels, lambda interval: interval[0] == 0.0),
    ):
        arm = summarize_arm(np.repeat(shares[:, None], 4, axis=1), 300, 0)
        assert at_end(arm.mean.ci95)
        assert 0 < arm.mean.ci95[1] - arm.mean.ci95[0] < 1, "and the other end is where it was"


def test_with_two_seeds_nothing_is_said_about_training() -> None:
    values = np.array([[1.0, 0.0], [1.0, 1.0]])
    assert summarize_arm(values, 100, 0).mean.ci95 is None
    compared = compare_arms(values, values[::-1], 100, 0)
    assert (compared.ci95, compared.p, compared.improvement_ci95, compared.seeds_needed) == (None,) * 4


def test_the_number_of_seeds_has_the_power_that_it_promises() -> None:
    differences = np.array([0.04, -0.01, 0.03, 0.0, 0.02])
    needed = seeds_needed(differences)
    draw = np.random.default_rng(1)

    def power(count: int) -> float:
        drawn = draw.normal(differences.mean(), differences.std(ddof=1), (20_000, count))
        return float((ttest_1samp(drawn, 0, axis=1).pvalue < 0.05).mean())

    assert power(needed) == pytest.approx(0.8, abs=0.06)
    assert power(needed - 1) < 0.8 + 0.01
    assert seeds_needed(np.zeros(4)) is None
    assert seeds_needed(np.array([1e-6, -1.0, 1.0])) is None
