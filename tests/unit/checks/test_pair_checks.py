"""What held-out preferences say of a reward model, and which policy wins by its scores, are those of plain loops."""

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import norm
from synthetic_runs import configuration

from rloo_pipeline.checks.pair_checks import measures, pair_accuracy
from rloo_pipeline.checks.statistics import share_interval
from rloo_pipeline.report.summary import judged_rate, win_rate, win_rates_of

NAN = float("nan")


def test_accuracy_margin_and_length_are_those_of_a_loop_over_prompts() -> None:
    draw = np.random.default_rng(0)
    chosen, rejected = draw.normal(1, 1, 60), draw.normal(0, 1, 60)
    rejected[0] = chosen[0]
    keys, lengths = [str(pair // 2) for pair in range(60)], draw.integers(3, 40, (60, 2))
    found = measures(chosen, rejected, keys, lengths, seed=1)
    right = [0.5 if c == r else float(c > r) for c, r in zip(chosen, rejected, strict=True)]
    assert (found["pairs"], found["prompts"]) == (60, 30)
    assert found["accuracy"]["value"] == pytest.approx(sum(right) / 60)
    low, high = found["accuracy"]["ci95"]
    assert 0.5 < low < found["accuracy"]["value"] < high < 1
    assert found["margin"]["value"] == pytest.approx((chosen - rejected).mean())
    rewards, tokens = [*chosen, *rejected], [*lengths[:, 0], *lengths[:, 1]]
    assert found["length_correlation"] == pytest.approx(np.corrcoef(rewards, tokens)[0, 1])


def test_each_prompt_counts_the_same_however_many_pairs_it_has() -> None:
    rejected = np.array([0.0] * 9 + [3.0])
    found = measures(np.ones(10), rejected, ["a"] * 9 + ["b"], np.ones((10, 2)), seed=1)
    assert (found["accuracy"]["value"], found["margin"]["value"]) == (0.5, (1.0 - 2.0) / 2)
    shown = pair_accuracy(found).shown
    assert shown.startswith("50.0% (")
    assert "of the held-out pairs of a prompt, on average over 2 prompts" in shown


def test_the_interval_of_rewards_that_know_nothing_begins_below_chance() -> None:
    draw = np.random.default_rng(1)
    found = measures(draw.normal(size=200), draw.normal(size=200), [str(n) for n in range(200)], np.ones((200, 2)), 0)
    assert found["accuracy"]["ci95"][0] < 0.5
    assert found["length_correlation"] is None


def test_the_win_rate_counts_every_pair_of_scored_completions_and_ties_half() -> None:
    before = np.array([[0.0, 1.0], [2.0, NAN], [NAN, NAN], [1.0, 1.0]])
    after = np.array([[1.0, 2.0], [1.0, 3.0], [1.0, 1.0], [1.0, 0.0]])
    rate = win_rate(before, after)
    by_prompt = [(1 + 0.5 + 1 + 1) / 4, (0 + 1) / 2, (0.5 + 0.5 + 0 + 0) / 4]
    assert rate.value == pytest.approx(sum(by_prompt) / 3)
    assert 0 <= rate.ci95[0] < rate.value < rate.ci95[1] <= 1
    assert win_rate(before[2:3], after[2:3]) is None
    assert win_rate(before, before).value == 0.5
    assert win_rate(np.array([[0.3 + 0.2 + 0.1]]), np.array([[0.1 + 0.2 + 0.3]])).value == 0.5, "sums that are equal"


def test_the_lower_score_wins_if_the_weight_of_the_reward_is_negative() -> None:
    length = {"function": "rloo_pipeline.rewards.length:overlong_reward", "name": "length"}
    before, after = (
        pa.table({"scores/length": scores, "scores/answer": [0.0] * 2}) for scores in ([3.0, 4.0], [2.0, 1.0])
    )
    rewards = configuration().model_dump(mode="json")["rewards"][:1]
    rates = {}
    for weight in (-0.5, 0.0, 0.5):
        config = configuration(rewards=[*rewards, length | {"weight": weight}], evaluation={"num_generations": 1})
        rates[weight] = win_rates_of(config, (before, after))["length"]["value"]
    assert rates == {-0.5: 1.0, 0.0: 0.0, 0.5: 0.0}


def test_pairs_of_the_same_completions_are_not_independent() -> None:
    """If prompts hardly differ, the interval is as wide as for K samples of each, not as for all K² pairs."""
    before = np.tile(np.arange(8.0), (4, 1))
    rate = win_rate(before, before + np.array([[0.0], [0.0], [0.0], [0.25]]))
    assert rate.ci95[1] - rate.ci95[0] >= np.diff(share_interval(rate.value, 4 * 8))


def test_completions_without_a_score_do_not_make_a_win_rate_surer() -> None:
    draw, none = np.random.default_rng(3), np.full((40, 7), NAN)
    before, after = draw.normal(size=(40, 1)), draw.normal(1, 1, (40, 1))
    assert win_rate(np.hstack([before, none]), np.hstack([after, none])) == win_rate(before, after)
    verdicts = draw.integers(0, 2, (2, 40, 1)).astype(float)
    assert judged_rate(np.concatenate([verdicts, [none] * 2], axis=2)) == judged_rate(verdicts)


def test_the_interval_of_the_accuracy_has_its_coverage_where_few_prompts_have_most_of_the_pairs() -> None:
    draw, keys = np.random.default_rng(4), [str(pair % 10 if pair < 910 else pair) for pair in range(1000)]
    lengths, hits = np.ones((1000, 2)), 0
    for _ in range(150):
        low, high = measures(draw.random(1000), np.full(1000, 0.02), keys, lengths, 0)["accuracy"]["ci95"]
        hits += low <= 0.98 <= high
    assert hits >= 0.93 * 150


@pytest.mark.parametrize(("prompts", "samples", "shift"), [(10, 4, 2.9), (50, 1, 1.8)])
def test_the_intervals_of_win_rates_have_their_coverage(prompts, samples, shift) -> None:
    """Of high rates, of which Student's interval and the bootstrap's miss a tenth."""
    draw, truth, hits = np.random.default_rng(prompts), norm.cdf(shift / np.sqrt(2)), 0
    for _ in range(400):
        before, after = (draw.normal(mean, 1, (prompts, samples)) for mean in (0, shift))
        low, high = win_rate(before, after).ci95
        hits += low <= truth <= high
    assert hits >= 0.935 * 400


def test_a_judged_pair_counts_with_the_mean_of_both_orders_if_it_has_both() -> None:
    verdicts = np.array([[[1.0, 0.0], [1.0, NAN], [NAN, NAN]], [[1.0, 0.5], [0.0, 1.0], [1.0, 1.0]]])
    rate, same = judged_rate(verdicts)
    assert rate.value == pytest.approx(((1 + 0.25) / 2 + 0.5) / 2)
    assert same == pytest.approx(1 / 3)
    assert judged_rate(verdicts[:, 2:]) == (None, None)
