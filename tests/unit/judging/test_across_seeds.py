"""Statistics over seeds: by hand, against scipy, and by the simulation of tools/coverage_over_seeds.py."""

from itertools import product

import numpy as np
import pytest
from helpers import ROOT
from scipy.stats import beta, mannwhitneyu, norm, t, ttest_1samp

from rloo_pipeline.judging.across_seeds import chance_ci95, compare_arms, smallest_p, summarize_arm


@pytest.fixture
def coverage(monkeypatch):
    """The module tools/coverage_over_seeds.py."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import coverage_over_seeds

    return coverage_over_seeds


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_intervals_contain_the_truth_in_19_of_20_experiments(coverage, seeds) -> None:
    """Clopper and Pearson: of 200 experiments with 95%, fewer than 180 have a chance of 0.1%."""
    for prompts, share, spread in ((50, 0.998, 1.0), (200, 0.5, 1.0), (200, 0.98, 0.3)):
        cell = coverage.Cell(seeds, prompts, share, spread, 0.0)
        hits = coverage.hits(cell, 200, np.random.default_rng(seeds))
        assert min(hits.mean, hits.difference) >= 180, (cell, hits)
        assert hits.false_alarms <= 20, "of equal arms one in twenty differs"


def test_a_collapse_that_no_seed_shows_is_not_in_the_interval(coverage) -> None:
    """The reason for the low figures in the docs: 0.8³ of the experiments with 3 seeds have none that collapsed."""
    hits = coverage.hits(coverage.Cell(3, 1000, 0.98, 0.0, 0.2), 200, np.random.default_rng(0))
    assert hits.mean / 200 == pytest.approx(1 - 0.8**3, abs=0.1)


def test_few_problems_take_more_seeds_than_many(coverage) -> None:
    """Also the noise of an evaluation varies from seed to seed, and counts for seeds and for problems."""
    few, many = (
        coverage.power(coverage.Cell(10, prompts, 0.5, spread, 0.0), 1.0, 100, np.random.default_rng(0))
        for prompts, spread in ((50, 0.3), (1000, 1.0))
    )
    assert few < 70 < many


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_where_all_seeds_agree_the_intervals_have_a_width_and_p_is_what_the_seeds_allow(seeds) -> None:
    """Korn and Graubard: as many answers as prompts, times the square of the normal over Student's quantile."""
    none, every = np.zeros((seeds, 200)), np.ones((seeds, 200))
    answers = 200 * (norm.ppf(0.975) / t.ppf(0.975, seeds - 1)) ** 2
    high = beta.ppf(0.975, 1, answers)
    assert summarize_arm(none).mean.ci95 == (0.0, pytest.approx(high))
    assert summarize_arm(every).mean.ci95 == (pytest.approx(1 - high), 1.0)
    assert summarize_arm(none + 0.3).mean.ci95[1] > 0.33, "rounding of equal values is not a variance"
    compared = compare_arms(every, none, 100, 0)
    assert compared.p == smallest_p(seeds) == 2 / 2**seeds
    assert compared.ci95 == (pytest.approx(1 - np.sqrt(2) * high), 1.0)
    same = compare_arms(every, every, 100, 0)
    assert (same.p, same.ci95) == (1.0, (pytest.approx(-high), pytest.approx(high)))


def test_no_interval_leaves_what_is_possible_and_no_p_is_below_what_the_seeds_allow() -> None:
    """All tables of three seeds with shares at and near the edges."""
    for levels, others in product(product((0.0, 0.01, 0.99, 1.0), repeat=3), repeat=2):
        pair = [np.repeat(np.array(shares)[:, None], 5, axis=1) for shares in (levels, others)]
        for table in pair:
            low, high = summarize_arm(table).mean.ci95
            assert 0 <= low <= table.mean() + 1e-9
            assert table.mean() - 1e-9 <= high <= 1
            assert high - low > 0.01
        compared = compare_arms(*pair, 100, 0)
        assert -1 <= compared.ci95[0] <= compared.value + 1e-9
        assert compared.value - 1e-9 <= compared.ci95[1] <= 1
        assert 0.25 <= compared.p <= 1


def test_numbers_by_hand() -> None:
    levels = np.array([0.2, 0.4, 0.5, 0.6, 0.9])
    arm = summarize_arm(np.repeat(levels[:, None], 4, axis=1))
    assert arm.mean.value == pytest.approx(0.52)
    assert arm.iqm.value == pytest.approx(0.5), "the middle three of five"
    margin = t.ppf(0.975, 4) * levels.std(ddof=1) / np.sqrt(5)
    answers = norm.ppf(0.975) ** 2 * 0.52 * 0.48 / margin**2
    right, wrong = 0.52 * answers, 0.48 * answers
    assert arm.mean.ci95 == pytest.approx((beta.ppf(0.025, right, wrong + 1), beta.ppf(0.975, right + 1, wrong)))
    values, others = np.array([[0.9], [0.8], [0.7]]), np.array([[0.5], [0.7], [0.75]])
    compared = compare_arms(values, others, 100, 0)
    assert compared.value == pytest.approx(0.45 / 3)
    u = mannwhitneyu(values.ravel(), others.ravel()).statistic
    assert compared.improvement == pytest.approx((u - 2) / 6), "without the pairs of equal seeds, of which it wins two"
    assert compared.p == pytest.approx(4 / 8), "signs with which 0.4, 0.1 and 0.05 have a sum of at least 0.45"
    assert ttest_1samp((values - others).ravel(), 0).pvalue < compared.p


def test_arms_that_differ_by_the_rounding_of_their_sums_are_equal() -> None:
    """In each seed one of three problems wins 2/3, and the others lose 1/3 each; the sums are 1e-16, never 0."""
    changes = np.array([np.roll([2, -1, -1], seed) for seed in range(18)]) / 3
    values, others = 1 / 3 + np.maximum(changes, 0), 1 / 3 + np.maximum(-changes, 0)
    assert (values - others).mean() != 0
    assert compare_arms(values, others, 100, 0).p == 1.0


def test_p_is_that_of_students_t_where_signs_say_more() -> None:
    """Ten seeds with one far away: the sign-flip test counts 2 of 1024 patterns, Student's t does not."""
    levels = np.array([0.01] * 9 + [0.5])
    compared = compare_arms(np.repeat(levels[:, None], 3, axis=1), np.zeros((10, 3)), 100, 0)
    assert compared.p == pytest.approx(ttest_1samp(levels, 0).pvalue)
    assert compared.p > 10 * smallest_p(10)


def test_a_mean_over_prompts_that_differ_is_as_uncertain_as_with_one_seed() -> None:
    """Seeds that answer alike are one sample of the prompts: Student's interval over prompts."""
    prompts = np.random.default_rng(0).random(200).round()
    low, high = summarize_arm(np.tile(prompts, (3, 1))).mean.ci95
    margin = t.ppf(0.975, 199) * prompts.std(ddof=1) / np.sqrt(200)
    assert (high - low) / 2 == pytest.approx(margin, rel=0.05)


def test_the_interquartile_mean_has_the_standard_error_of_tukey_and_mclaughlin() -> None:
    """As scipy's, but for the share that is really left out."""
    from scipy.stats.mstats import trimmed_stde

    levels = np.array([0.1, 0.42, 0.45, 0.47, 0.5, 0.52, 0.55, 0.9])
    arm = summarize_arm(np.repeat(levels[:, None], 2, axis=1))
    margin = t.ppf(0.975, 3) * float(trimmed_stde(levels, (0.25, 0.25))) * np.sqrt(8 * 4 / (4 * 7) * 7 / 6 * 6 / 8)
    assert arm.iqm.value == pytest.approx(levels[2:6].mean())
    low, high = arm.iqm.ci95
    assert (high - low) / 2 == pytest.approx(margin, rel=0.2)
    assert summarize_arm(np.zeros((4, 5))).iqm is None, "of four seeds it would keep two"


@pytest.mark.parametrize("shift", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_intervals_of_the_chance_to_improve_contain_the_truth_in_19_of_20_experiments(seeds, shift) -> None:
    """Fewer than 368 of 400 have a chance of 0.2%; levels of trainings are normal, so the truth is known."""
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


def test_seeds_that_both_arms_share_do_not_make_an_improvement_likelier() -> None:
    """Starts that differ more than the arms: a run of one beats a run of the other whenever its start is better."""
    levels = np.array([[0.2], [0.5], [0.9]]).repeat(4, axis=1)
    assert compare_arms(levels + 0.01, levels, 100, 0).improvement == 0.5
    draw = np.random.default_rng(0)
    found = []
    for _ in range(400):
        starts = draw.normal(0.5, 0.1, (3, 1))
        arms = [starts + draw.normal(mean, 0.02, (3, 1)) for mean in (0.03, 0.0)]
        found.append(compare_arms(*arms, 100, 0).improvement)
    truth = norm.cdf(0.03 / np.sqrt(2 * (0.1**2 + 0.02**2)))
    assert np.mean(found) == pytest.approx(truth, abs=4 * np.std(found) / np.sqrt(400))


def test_with_two_seeds_nothing_is_said_about_training() -> None:
    values = np.array([[1.0, 0.0], [1.0, 1.0]])
    assert summarize_arm(values).mean.ci95 is None
    compared = compare_arms(values, values[::-1], 100, 0)
    assert (compared.ci95, compared.p, compared.improvement, compared.improvement_ci95) == (None,) * 4
