"""On a bandit whose gradient is known exactly, RLOO's estimate is unbiased, and its baseline lowers the variance.

Over all completions of at most two tokens: which gradient follows from samples of older policies (rollout.lag and
rollout.token_budget), and which one each estimate of the KL has.
"""

from itertools import product

import pytest
import torch

from rloo_pipeline.algorithm import advantages, kl, mismatch
from rloo_pipeline.algorithm.loss import Bounds, Totals, aggregate, log_ratio, losses

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


COMPLETIONS = [[2], *([first, second] for first in (0, 1) for second in (0, 1, 2))]
"""All completions of at most two tokens; 2 is the end token."""
PREFIXES = [[0, 0], *([0, 1 + first] for first in (0, 1) for _ in range(3))]
"""Row of the logits that each token is drawn from."""
TOKENS = torch.tensor([[*ids, 0][:2] for ids in COMPLETIONS])
MASK = torch.tensor([[True, len(ids) == 2] for ids in COMPLETIONS])
REWARDS = torch.tensor([0.5, 1.0, 0.0, 3.0, 2.0, -1.0, 0.3]).double()
LATEST, OLDER, REFERENCE = torch.randn(3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def logps_of(logits: torch.Tensor) -> torch.Tensor:
    """Log-probs of the tokens of all completions, [7, 2]."""
    return torch.where(MASK, logits.log_softmax(-1)[torch.tensor(PREFIXES), TOKENS], 0.0)


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    return logps_of(logits).sum(-1).exp()


def gradient(value) -> torch.Tensor:
    """Of a function of the logits, at those of the latest policy."""
    logits = LATEST.clone().requires_grad_()
    return torch.autograd.grad(value(logits), logits)[0]


def gradient_on_older_samples(level, correction, low=None, high=None, second=OLDER) -> torch.Tensor:
    """−∇ of the clipped loss at π_old = LATEST, exactly: over all pairs of completions of an older policy, of which
    another policy sampled the second token.
    """
    pairs = torch.tensor(list(product(range(7), repeat=2)))
    rows = pairs.flatten()
    sampled = torch.stack([logps_of(OLDER)[:, 0], logps_of(second)[:, 1]], dim=-1)
    old, sampling = logps_of(LATEST)[rows], sampled[rows]
    weight = mismatch.weights(old, sampling, MASK[rows], correction, low, high).weight if correction != "none" else 1.0
    advantage = advantages.rloo(REWARDS[pairs]).flatten()
    probability = sampled.sum(-1).exp()[pairs].prod(-1).repeat_interleave(2).unsqueeze(-1)

    def loss(logits):
        result = losses(logps_of(logits)[rows], old, advantage, MASK[rows], level, "ppo", Bounds(0.2, 0.2))
        return (probability * result.loss * weight / 2).sum()

    return -gradient(loss)


def test_on_samples_of_an_older_policy_weights_of_completions_give_the_gradient_of_the_one_before_the_update() -> None:
    """Decoupled: the weights π_old / π_sampler are far outside of the clip range around π_old, which does not act."""
    exact = gradient(lambda logits: (probabilities(logits) * REWARDS).sum())
    torch.testing.assert_close(gradient_on_older_samples("sequence", "sequence_tis"), exact)


def test_on_segments_of_several_policies_weights_of_completions_give_it_too() -> None:
    exact = gradient(lambda logits: (probabilities(logits) * REWARDS).sum())
    in_segments = gradient_on_older_samples("sequence", "sequence_tis", second=REFERENCE)
    torch.testing.assert_close(in_segments, exact)


def test_with_weights_of_tokens_or_cut_ones_or_none_it_is_another_gradient() -> None:
    """A token's weight leaves its prefix, and the rest of its completion, to the older policy."""
    exact = gradient(lambda logits: (probabilities(logits) * REWARDS).sum())
    for other in (("token", "token_mis", 1e-6, 1e6), ("sequence", "none"), ("sequence", "sequence_tis", None, 1.2)):
        assert (gradient_on_older_samples(*other) - exact).norm() > 0.05 * exact.norm()


def gradient_on_masked_samples(correction) -> torch.Tensor:
    """−∇ of the loss over all pairs that the policy samples with `min_tokens: 1`, which leaves out completion 0."""
    masked = LATEST.clone()
    masked[0, 2] = -torch.inf
    pairs = torch.tensor(list(product(range(1, 7), repeat=2)))
    rows = pairs.flatten()
    old, sampling = logps_of(LATEST)[rows], logps_of(masked)[rows]
    weight = mismatch.weights(old, sampling, MASK[rows], correction, None, None).weight if correction else 1.0
    advantage = advantages.rloo(REWARDS[pairs]).flatten()
    probability = probabilities(masked)[pairs].prod(-1).repeat_interleave(2).unsqueeze(-1)

    def loss(logits):
        result = losses(logps_of(logits)[rows], old, advantage, MASK[rows], "sequence", "ppo", Bounds(0.2, 0.2))
        return (probability * result.loss * weight / 2).sum()

    return -gradient(loss)


def test_on_masked_samples_weights_give_the_gradient_in_which_what_is_masked_has_advantage_0() -> None:
    """Without weights the gradient is another one."""
    inside = probabilities(LATEST)[1:]
    baseline = (inside / inside.sum() * REWARDS[1:]).sum()
    expected = gradient(lambda logits: (probabilities(logits) * (REWARDS - baseline))[1:].sum())
    torch.testing.assert_close(gradient_on_masked_samples("sequence_tis"), expected)
    assert (gradient_on_masked_samples(None) - expected).norm() > 0.05 * expected.norm()


def in_the_loss(estimator, bias_correction=False, mode="sequence_mean_token_sum") -> torch.Tensor:
    """Mean gradient of a KL in the loss, on the policy's own samples."""
    drawn, old = probabilities(LATEST), logps_of(LATEST)

    def loss(logits):
        logps = logps_of(logits)
        tokens = kl.estimate(estimator, logps, logps_of(REFERENCE), MASK)
        tokens = tokens * log_ratio(logps, old, MASK, "token").exp() if bias_correction else tokens
        one = Totals(completions=1, tokens=1, longest=2)
        return sum(drawn[[row]] @ aggregate(tokens[[row]], MASK[[row]], mode, one)[None] for row in range(7))

    return gradient(loss)


def in_the_reward(estimator) -> torch.Tensor:
    """Mean gradient of E[KL of the completion] by REINFORCE."""
    penalty = kl.estimate(estimator, logps_of(LATEST), logps_of(REFERENCE), MASK).sum(-1)
    return gradient(lambda logits: (probabilities(LATEST) * penalty * logps_of(logits).sum(-1)).sum())


def next_token_kl(from_reference: bool) -> torch.Tensor:
    """Gradient of the KL of the next token, over prefixes of the latest policy, whose distribution is held fixed."""
    met = torch.cat([torch.ones(1).double(), LATEST[0].softmax(-1)[:2]])

    def value(logits):
        policy, reference = logits.log_softmax(-1), REFERENCE.log_softmax(-1)
        first, second = (reference, policy) if from_reference else (policy, reference)
        return (met * (first.exp() * (first - second)).sum(-1)).sum()

    return gradient(value)


def test_k1_in_the_loss_has_the_gradient_of_nothing_or_of_the_mean_inverse_length() -> None:
    assert in_the_loss("k1").abs().max() < 1e-12
    inverse = (1 / MASK.sum(-1)).double()
    expected = gradient(lambda logits: (probabilities(logits) * inverse).sum())
    torch.testing.assert_close(in_the_loss("k1", mode="sequence_mean_token_mean"), expected)
    assert expected.norm() > 0.01


def test_k2_and_k3_in_the_loss_have_the_gradient_of_the_next_tokens_kl_in_either_direction() -> None:
    torch.testing.assert_close(in_the_loss("k2"), next_token_kl(from_reference=False))
    torch.testing.assert_close(in_the_loss("k3"), next_token_kl(from_reference=True))
    for estimator in ("k1", "k3"):
        torch.testing.assert_close(in_the_loss(estimator, bias_correction=True), next_token_kl(from_reference=False))
    whole = gradient(lambda logits: (probabilities(logits) * (logps_of(logits) - logps_of(REFERENCE)).sum(-1)).sum())
    assert (in_the_loss("k2") - whole).norm() > 0.05 * whole.norm(), "a token also changes the KL of those after it"


def test_in_the_reward_only_k1_has_the_gradient_of_the_kl(monkeypatch) -> None:
    def whole(logits):
        return (probabilities(logits) * (logps_of(logits) - logps_of(REFERENCE)).sum(-1)).sum()

    torch.testing.assert_close(in_the_reward("k1"), gradient(whole))
    monkeypatch.setitem(globals(), "REFERENCE", LATEST + 0.01 * REFERENCE)
    torch.testing.assert_close(in_the_reward("k1"), gradient(whole))
    for estimator in ("k2", "k3"):
        assert in_the_reward(estimator).norm() < 0.02 * gradient(whole).norm(), "near the reference they hardly pull"


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_distillation_has_the_gradient_of_the_reverse_kl_of_the_next_token_or_of_the_rest(discount) -> None:
    """Advantages of tokens are −γ-discounted sums of log π_old − log π_teacher; here REFERENCE is the teacher."""
    advantage = -kl.reward_to_go(kl.estimate("k1", logps_of(LATEST), logps_of(REFERENCE), MASK), discount)

    def loss(logits):
        result = losses(logps_of(logits), logps_of(LATEST), advantage, MASK, "token", "ppo", Bounds(0.2, 0.2))
        return (probabilities(LATEST).unsqueeze(-1) * result.loss).sum()

    next_token = next_token_kl(from_reference=False)
    whole = gradient(lambda logits: (probabilities(logits) * (logps_of(logits) - logps_of(REFERENCE)).sum(-1)).sum())
    torch.testing.assert_close(gradient(loss), (1 - discount) * next_token + discount * whole)
    assert (whole - next_token).norm() > 0.05 * whole.norm()
