"""Tokens that losses leave out or hold back, against loops over numbers written from papers, verl and TRL."""

import math
import random

import pytest
import torch

from rloo_pipeline.algorithm import token_choice
from rloo_pipeline.algorithm.loss import Bounds, losses
from rloo_pipeline.config import Algorithm, Rollout
from rloo_pipeline.training.batch import AlgorithmState, RoundTensors, make_batch, with_choices
from rloo_pipeline.training.objective import Record, StepLoss

DRAW = random.Random(1)
LENGTHS = [4, 1, 3, 5, 2, 5, 3, 4]
WIDTH = max(LENGTHS)
SCORES = [1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0, 0.25]
MASKED = 3
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(-1)
OLD, NEW, ENTROPIES = (
    [[sign * DRAW.uniform(0.05, 3.0) for _ in range(length)] for length in LENGTHS] for sign in (-1, -1, 1)
)
PLACES = [(i, t) for i, length in enumerate(LENGTHS) if i != MASKED for t in range(length)]


def padded(rows: list[list[float]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def chosen(mask: torch.Tensor) -> list[tuple[int, int]]:
    return [tuple(place) for place in mask.nonzero().tolist()]


def in_loss() -> torch.Tensor:
    return MASK & (torch.arange(8) != MASKED).unsqueeze(-1)


def quantile(values: list[float], share: float) -> float:
    """Linear between neighbours, as torch.quantile, which TRL uses."""
    ordered, place = sorted(values), share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 1.0])
def test_the_tokens_of_highest_entropy_are_kept(share) -> None:
    threshold = quantile([ENTROPIES[i][t] for i, t in PLACES], 1 - share)
    kept = [(i, t) for i, t in PLACES if ENTROPIES[i][t] >= threshold]
    assert chosen(token_choice.top_entropy(padded(ENTROPIES), in_loss(), share)) == kept
    assert len(kept) == len(PLACES) - math.ceil(round((1 - share) * (len(PLACES) - 1), 9))


def covariances(advantages: list[float]) -> dict[tuple[int, int], float]:
    of_tokens = [advantages[i] for i, _ in PLACES]
    logps = [OLD[i][t] for i, t in PLACES]
    mean, center = sum(of_tokens) / len(PLACES), sum(logps) / len(PLACES)
    return {(i, t): (advantages[i] - mean) * (OLD[i][t] - center) for i, t in PLACES}


ADVANTAGES = [1.5, -0.5, 0.25, 3.0, -2.0, 0.0, 1.0, -0.75]


@pytest.mark.parametrize("share", [1e-4, 0.2, 1.0])
def test_kl_cov_holds_the_tokens_of_largest_covariance(share) -> None:
    values = covariances(ADVANTAGES)
    largest = sorted(values, key=lambda place: -values[place])[: max(1, int(share * len(values)))]
    held = token_choice.kl_cov(torch.tensor(ADVANTAGES).double(), padded(OLD), in_loss(), share)
    assert chosen(held) == sorted(largest)


@pytest.mark.parametrize("share", [1e-4, 0.2, 1.0])
def test_clip_cov_drops_a_share_of_the_tokens_between_its_bounds_drawn_by_the_seed(share) -> None:
    values = covariances(ADVANTAGES)
    between = [place for place, value in values.items() if 0.1 < value < 2.0]
    assert 2 < len(between) < len(values)
    draws = []
    for seed in range(5):
        dropped = token_choice.clip_cov(
            torch.tensor(ADVANTAGES).double(), padded(OLD), in_loss(), share, 0.1, 2.0, seed
        )
        draws.append(tuple(chosen(dropped)))
        assert len(draws[-1]) == min(len(between), max(1, int(share * len(values))))
        assert set(draws[-1]) <= set(between)
    assert len(set(draws)) > 1 or share == 1


def test_a_round_without_a_token_to_choose_from_has_none() -> None:
    empty = torch.zeros_like(MASK)
    advantages = torch.tensor(ADVANTAGES).double()
    assert not token_choice.top_entropy(padded(ENTROPIES), empty, 0.2).any()
    assert not token_choice.kl_cov(advantages, padded(OLD), empty, 0.5).any()
    assert not token_choice.clip_cov(advantages, padded(OLD), empty, 0.5, 0.0, 9.0, 0).any()
    assert not token_choice.clip_cov(advantages, padded(OLD), in_loss(), 0.5, 90.0, 99.0, 0).any()


def test_kl_cov_adds_the_distance_from_the_old_log_probs_to_an_unclipped_loss() -> None:
    held = token_choice.kl_cov(torch.tensor(ADVANTAGES).double(), padded(OLD), MASK, 0.3)
    logps = padded(NEW).requires_grad_()
    bounds = Bounds(0.2, 0.2, kl_cov_coef=0.7)
    losses(
        logps, padded(OLD), torch.tensor(ADVANTAGES).double(), MASK, "token", "kl_cov", bounds, held
    ).loss.sum().backward()
    for i, length in enumerate(LENGTHS):
        for t in range(length):
            difference = NEW[i][t] - OLD[i][t]
            slope = -math.exp(difference) * ADVANTAGES[i] + 0.7 * bool(held[i, t]) * math.copysign(1, difference)
            assert float(logps.grad[i, t]) == pytest.approx(slope)


SECTIONS = {
    "clip_cov": {"clip": "clip_cov", "clip_cov_ratio": 0.3, "clip_cov_lb": 0.01, "clip_cov_ub": 2.0},
    "kl_cov": {"clip": "kl_cov", "kl_cov_ratio": 0.3, "kl_cov_coef": 0.7},
    "top entropy": {"top_entropy_quantile": 0.4},
    "both": {"clip": "clip_cov", "clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "top_entropy_quantile": 0.6},
}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_step_is_the_loop_over_its_tokens_however_it_is_split(name) -> None:
    """Loss and gradient of a step, and the same bytes of each token's gradient under every split into micro-batches."""
    keys = {"beta": 0, "importance_sampling_level": "token", "loss_agg_mode": "token_mean", **SECTIONS[name]}
    algorithm = Algorithm.model_validate({**keys, "mask_truncated_completions": True, "steps_per_generation": 2})
    truncated = torch.arange(8) == MASKED
    old, entropies = padded(OLD).float(), padded(ENTROPIES).float()
    completions = RoundTensors(torch.tensor(SCORES).double(), MASK, truncated, old, entropies=entropies)
    if algorithm.top_entropy_quantile == 1:
        completions = completions._replace(entropies=None)
    batch, _ = make_batch(algorithm, Rollout(num_generations=4, generation_batch_size=8), completions, AlgorithmState())
    batch = with_choices(algorithm, batch, seed=7)
    advantages = batch.advantages.tolist()
    total = 0.0
    slopes = [[0.0] * WIDTH for _ in LENGTHS]
    dropped = [] if batch.chosen is None or name == "kl_cov" else chosen(batch.chosen)
    held: list[tuple[int, int]] = []
    if name == "kl_cov":
        values = covariances(advantages)
        held = sorted(values, key=lambda place: -values[place])[: int(0.3 * len(values))]
    if algorithm.top_entropy_quantile < 1:
        threshold = quantile([ENTROPIES[i][t] for i, t in PLACES], 1 - algorithm.top_entropy_quantile)
        dropped = dropped + [(i, t) for i, t in PLACES if ENTROPIES[i][t] < threshold]
    assert dropped or held
    for i, t in PLACES:
        difference, a = NEW[i][t] - OLD[i][t], advantages[i]
        ratio = math.exp(difference)
        if (i, t) in dropped:
            continue
        if name == "kl_cov":
            total += -ratio * a + 0.7 * ((i, t) in held) * abs(difference)
            slopes[i][t] = -ratio * a + 0.7 * ((i, t) in held) * math.copysign(1, difference)
        else:
            clipped = min(max(ratio, 0.8), 1.2)
            total += -min(ratio * a, clipped * a)
            slopes[i][t] = -ratio * a if ratio * a <= clipped * a else 0.0
    results = []
    for split in ([range(8)], [range(4), range(4, 8)], [[row] for row in range(7, -1, -1)]):
        record = Record.empty(8)
        step, loss = StepLoss(algorithm, batch, range(8), WIDTH, record), 0.0
        leaf = padded(NEW).float().requires_grad_()
        for rows in split:
            part = [row for row in rows if row != MASKED]
            if part:
                share = step(part, leaf[part].where(MASK[part], 0.0), MASK[part], torch.zeros(len(part), WIDTH))
                share.backward()
                loss += float(share)
        assert loss == pytest.approx(total / len(PLACES), rel=1e-5)
        results.append(leaf.grad)
    torch.testing.assert_close(results[0], torch.tensor(slopes) / len(PLACES), rtol=1e-5, atol=1e-7)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("old_logps", "first", "held"), [("trainer", True, 0), ("trainer", False, 2), ("sampler", True, 2)]
)
def test_kl_cov_holds_nothing_where_ratios_differ_from_1_by_rounding_alone(old_logps, first, held) -> None:
    """Else the sign of a rounding error would be the gradient of the first step."""
    keys = {"preset": "kl_cov", "kl_cov_ratio": 0.1, "old_logps": old_logps, "steps_per_generation": 2}
    algorithm = Algorithm.model_validate(keys)
    scores, old = torch.zeros(8).double(), padded(OLD).float()
    completions = RoundTensors(scores, MASK, torch.zeros(8, dtype=torch.bool), old)
    batch, _ = make_batch(algorithm, Rollout(num_generations=4, generation_batch_size=8), completions, AlgorithmState())
    step = StepLoss(algorithm, with_choices(algorithm, batch, 0), range(8), WIDTH, Record.empty(8), first=first)
    leaf = (old + 1e-6 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0)).sign()).requires_grad_()
    step(range(8), leaf.where(MASK, 0.0), MASK, torch.zeros(8, WIDTH)).backward()
    assert int((leaf.grad != 0).sum()) == held
