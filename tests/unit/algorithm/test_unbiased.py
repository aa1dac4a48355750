"""On a bandit whose gradient is known exactly, RLOO's estimate is unbiased, and its baseline lowers the variance.

The same gradient follows from samples of an older policy (rollout.lag), weighted by `mismatch`.
"""

from itertools import product

import pytest
import torch

from rloo_pipeline.algorithm import advantages, mismatch
from rloo_pipeline.algorithm.loss import Bounds, losses

LOGITS = torch.tensor([0.2, -0.3, 0.5, -1.0]).double()
VALUES = torch.tensor([1.0, 0.0, 3.0, 2.0]).double()
PROBS = LOGITS.softmax(0)
EXACT = PROBS * (VALUES - (PROBS * VALUES).sum())
"""∇ E[R] with respect to the logits of a softmax policy over four arms."""
DRAWS = 400_000


def estimates(samples: int, estimator) -> torch.Tensor:
    """DRAWS/samples gradient estimates from groups of `samples` draws each, [groups, arms]."""
    generator = torch.Generator().manual_seed(samples)
    arms = torch.multinomial(PROBS, DRAWS, replacement=True, generator=generator).view(-1, samples)
    scores = torch.eye(4).double()[arms] - PROBS  # ∇ log π of each draw
    return (estimator(VALUES[arms]).unsqueeze(-1) * scores).mean(1)


def off(estimate: torch.Tensor) -> torch.Tensor:
    """How many standard errors the mean of the estimates is from the exact gradient, by arm."""
    return ((estimate.mean(0) - EXACT) / (estimate.std(0) / len(estimate) ** 0.5)).abs()


@pytest.mark.parametrize("samples", [2, 4, 8])
def test_the_mean_of_the_rloo_estimate_is_the_gradient(samples) -> None:
    assert (off(estimates(samples, advantages.rloo)) < 3).all()


@pytest.mark.parametrize("samples", [2, 4, 8])
def test_a_baseline_that_contains_the_sample_itself_is_biased(samples) -> None:
    """Dr. GRPO's mean: shrunk by (K − 1)/K. It shows that the test above can fail."""
    estimate = estimates(samples, advantages.dr_grpo)
    assert (off(estimate) > 3).any()
    assert (off(estimate * samples / (samples - 1)) < 3).all()


@pytest.mark.parametrize("samples", [2, 4, 8])
def test_its_variance_is_below_that_of_one_sample_without_a_baseline(samples) -> None:
    single_sample = estimates(1, lambda rewards: rewards).var(0).sum()
    assert estimates(samples, advantages.rloo).var(0).sum() < single_sample


@pytest.mark.parametrize("samples", [2, 4, 8])
def test_its_variance_is_below_that_of_as_many_samples_without_a_baseline(samples) -> None:
    plain = estimates(samples, lambda rewards: rewards).var(0).sum()
    assert estimates(samples, advantages.rloo).var(0).sum() < plain


@pytest.mark.parametrize("samples", [2, 3, 4, 8])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_maxrl_is_the_gradient_of_the_log_of_success_to_the_order_of_its_siblings(samples, p) -> None:
    """Over all outcomes of a coin with success p = σ(logit): ∇p Σ_{k < K−1} (1 − p)^k, which tends to ∇p / p."""
    outcomes = torch.tensor(list(product([0.0, 1.0], repeat=samples)), dtype=torch.float64)
    probability = torch.where(outcomes == 1, p, 1 - p).prod(-1)
    estimate = (probability * (advantages.maxrl(outcomes) * (outcomes - p)).mean(-1)).sum()
    assert estimate.item() == pytest.approx(p * (1 - p) * sum((1 - p) ** k for k in range(samples - 1)))


def gradient_on_older_samples(correction, low=None, high=None) -> torch.Tensor:
    """−∇ of the clipped loss at π_old = PROBS, exactly: over all pairs of draws from an older policy."""
    older = torch.tensor([0.0, 0.4, -0.3, -0.5]).double().log_softmax(0)
    pairs = torch.tensor(list(product(range(4), repeat=2)))
    logits = LOGITS.clone().requires_grad_()
    arms = pairs.flatten().unsqueeze(-1)
    old, sampling, mask = LOGITS.log_softmax(0)[arms], older[arms], torch.ones_like(arms, dtype=torch.bool)
    weight = mismatch.weights(old, sampling, mask, correction, low, high).weight if correction != "none" else 1.0
    advantage = advantages.rloo(VALUES[pairs]).flatten()
    loss = losses(logits.log_softmax(0)[arms], old, advantage, mask, "sequence", "ppo", Bounds(0.2, 0.2)).loss * weight
    probability = older[pairs].sum(-1).exp().repeat_interleave(2).unsqueeze(-1)
    (probability * loss / 2).sum().backward()
    return -logits.grad


def test_on_samples_of_an_older_policy_weights_give_the_gradient_of_the_one_before_the_update() -> None:
    """Decoupled: the weights π_old / π_sampler are far outside of the clip range around π_old, which does not act."""
    assert gradient_on_older_samples("sequence_tis") == pytest.approx(EXACT)
    assert gradient_on_older_samples("token_mis", 0.01, 100.0) == pytest.approx(EXACT)


def test_without_weights_or_with_some_of_them_cut_it_is_another_gradient() -> None:
    """It shows that the test above can fail."""
    for cut in (("none",), ("sequence_tis", None, 1.2), ("token_mis", 0.5, 2.0)):
        assert gradient_on_older_samples(*cut) != pytest.approx(EXACT, rel=0.05)
