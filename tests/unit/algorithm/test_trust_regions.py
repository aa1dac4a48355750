"""PPO, SAPO, DPPO and GDPO against loops over numbers, written from their papers; gradients by finite differences."""

import math
import random

import pytest
import torch

from rloo_pipeline.algorithm.loss import Bounds, losses
from rloo_pipeline.algorithm.shaping import normalized_sum

DRAW = random.Random(0)
LENGTHS = [3, 1, 2, 3]
LOGPS, OLD = ([[math.log(DRAW.uniform(0.02, 0.98)) for _ in range(3)] for _ in LENGTHS] for _ in range(2))
ADVANTAGES = [0.5, -0.7, 0.0, -2.0]
BOUNDS = Bounds(0.15, 0.3, None, 1.0, 1.05)


def ppo(logp: float, old: float, advantage: float) -> float:
    """−min(ρA, clip(ρ, 1−ε, 1+ε_high)A), arXiv 1707.06347."""
    ratio = math.exp(logp - old)
    return -min(ratio * advantage, min(max(ratio, 0.85), 1.3) * advantage)


def sapo(logp: float, old: float, advantage: float) -> float:
    """−(4/τ) σ(τ(ρ − 1)) A, arXiv 2511.20347."""
    temperature = 1.0 if advantage > 0 else 1.05
    return -4 / temperature / (1 + math.exp(-temperature * (math.exp(logp - old) - 1))) * advantage


def dppo_tv_gradient(logp: float, old: float, advantage: float) -> float:
    """−min(ρ, 20) A inside the trust region, arXiv 2602.04879: the weight is a constant, so it has no derivative."""
    moved = math.exp(logp) - math.exp(old)
    outside = moved > 0.3 if advantage > 0 else moved < -0.15
    return 0.0 if outside else -min(math.exp(logp - old), 20.0) * advantage


def derivative(function, logp: float, *others: float) -> float:
    return (function(logp + 1e-6, *others) - function(logp - 1e-6, *others)) / 2e-6


def by_loops(gradient) -> list[list[float]]:
    """Per token, 0 after the end of a completion."""
    return [
        [gradient(LOGPS[i][t], OLD[i][t], ADVANTAGES[i]) if t < LENGTHS[i] else 0.0 for t in range(3)] for i in range(4)
    ]


def computed(clip):
    logps = torch.tensor(LOGPS, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(3) < torch.tensor(LENGTHS).unsqueeze(-1)
    old, advantages = (torch.tensor(values, dtype=torch.float64) for values in (OLD, ADVANTAGES))
    result = losses(logps, old, advantages, mask, "token", clip, BOUNDS)
    result.loss.sum().backward()
    return result, logps.grad.tolist()


def test_ppo_has_the_value_and_the_gradient_of_its_clip_and_counts_what_the_clip_holds() -> None:
    result, gradient = computed("ppo")
    assert result.loss.tolist() == [pytest.approx(row) for row in by_loops(ppo)]
    assert gradient == [pytest.approx(row, abs=1e-7) for row in by_loops(lambda *token: derivative(ppo, *token))]
    low, high = (
        [sum(row) / length for row, length in zip(by_loops(held), LENGTHS, strict=True)]
        for held in (
            lambda logp, old, a: float(a < 0 and math.exp(logp - old) < 0.85),
            lambda logp, old, a: float(a > 0 and math.exp(logp - old) > 1.3),
        )
    )
    assert (result.low.tolist(), result.high.tolist()) == (pytest.approx(low), pytest.approx(high))


def test_sapo_has_the_value_and_the_gradient_of_its_soft_gate() -> None:
    result, gradient = computed("sapo")
    assert result.loss.tolist() == [pytest.approx(row) for row in by_loops(sapo)]
    slopes = by_loops(lambda *token: derivative(sapo, *token))
    assert gradient == [pytest.approx(row, abs=1e-7) for row in slopes]


def test_dppo_has_no_gradient_where_a_probability_moved_further_than_its_trust_region() -> None:
    result, gradient = computed("dppo_tv")
    expected = by_loops(dppo_tv_gradient)
    assert gradient == [pytest.approx(row) for row in expected]
    cut = sum(
        value == 0 for row, length, a in zip(expected, LENGTHS, ADVANTAGES, strict=True) for value in row[:length] if a
    )
    assert 0 < cut < sum(LENGTHS)
    assert (result.low.sum() > 0) & (result.high.sum() > 0)


def vespo_gradient(i: int, t: int) -> float:
    """−φ(w) A with φ(w) = e^λ w^k e^(−λw), arXiv 2602.10693, a constant of the completion's ratio of probabilities."""
    if t >= LENGTHS[i]:
        return 0.0
    probability, old = (math.prod(math.exp(logp) for logp in rows[i][: LENGTHS[i]]) for rows in (LOGPS, OLD))
    w, (k, rate) = probability / old, (2.0, 3.0) if ADVANTAGES[i] >= 0 else (3.0, 2.0)
    return -math.exp(rate) * w**k * math.exp(-rate * w) * ADVANTAGES[i]


def test_vespo_weighs_each_token_by_a_gamma_of_the_whole_completions_ratio() -> None:
    result, gradient = computed("vespo")
    expected = [[vespo_gradient(i, t) for t in range(3)] for i in range(4)]
    assert gradient == [pytest.approx(row) for row in expected]
    by_value = [[slope * logp for slope, logp in zip(*rows, strict=True)] for rows in zip(expected, LOGPS, strict=True)]
    assert result.loss.tolist() == [pytest.approx(row) for row in by_value]


def test_vespo_bounds_ratios_as_its_authors_code_does() -> None:
    """A token's log-ratio by ±20, and that of a completion by log 1e-8 from below."""
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    old = torch.tensor([[25.0, -22.0], [30.0, 0.0], [0.0, -30.0]], dtype=torch.float64)
    logps = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    bounds = Bounds(0.2, 0.2, gamma_pos=(0.1, 3.0))
    losses(logps, old, torch.ones(3).double(), mask, "token", "vespo", bounds).loss.sum().backward()
    least = math.exp(3.0 + 0.1 * math.log(1e-8) - 3.0 * 1e-8)
    assert logps.grad.tolist() == [pytest.approx(row) for row in ([-1.0, -1.0], [-least, 0.0], [0.0, 0.0])]


def test_dppo_bounds_a_ratio_by_20() -> None:
    logps, mask = torch.zeros(1, 1, requires_grad=True), torch.ones(1, 1, dtype=torch.bool)
    losses(logps, torch.full((1, 1), -4.0), torch.tensor([-1.0]), mask, "token", "dppo_tv", BOUNDS).loss.backward()
    assert logps.grad.item() == 20


def normalized(group: list[float | None]) -> list[float]:
    """(r − mean) / (std + 1e-4) with Bessel's correction; 0 where there is no score."""
    scored = [value for value in group if value is not None]
    mean = sum(scored) / len(scored)
    std = math.sqrt(sum((value - mean) ** 2 for value in scored) / (len(scored) - 1))
    return [0.0 if value is None else (value - mean) / (std + 1e-4) for value in group]


def test_gdpo_normalizes_each_reward_in_its_group_before_they_are_summed() -> None:
    """arXiv 2601.05242, and the reason for it: two groups whose sums are equal differ by what was rewarded."""
    correct, style = [1.0, 0.0, 1.0, 0.0], [100.0, 300.0, None, 250.0]
    weights = [1.0, 0.5]
    expected = [
        sum(w * v for w, v in zip(weights, pair, strict=True))
        for pair in zip(normalized(correct), normalized(style), strict=True)
    ]
    values = torch.tensor(
        [[[c, math.nan if s is None else s] for c, s in zip(correct, style, strict=True)]], dtype=torch.float64
    )
    assert normalized_sum(values, torch.tensor(weights).double())[0].tolist() == pytest.approx(expected)


def test_a_completion_that_no_weighted_function_scored_has_no_normalized_reward() -> None:
    values = torch.tensor([[[1.0, 5.0], [math.nan, 6.0], [0.0, 7.0]]], dtype=torch.float64)
    sums = normalized_sum(values, torch.tensor([1.0, 0.0]).double())[0]
    assert sums.isnan().tolist() == [False, True, False]
    single = torch.tensor([[[5.0], [math.nan]]], dtype=torch.float64)
    assert normalized_sum(single, torch.ones(1).double())[0].nan_to_num(-1.0).tolist() == [0.0, -1.0], "has no spread"
    equal = torch.tensor([[[0.1 + 0.2, 1.0], [0.3, 1.0]]], dtype=torch.float64)
    assert normalized_sum(equal, torch.ones(2).double()).tolist() == [[0.0, 0.0]], "rounding is no spread"
