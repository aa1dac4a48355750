"""The algorithm's functions do what their formulas say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rloo_pipeline.algorithm import advantages, kl
from rloo_pipeline.algorithm.loss import clipped_surrogate, log_ratio

NAN = float("nan")


def test_rloo_is_the_reward_less_the_mean_of_the_others() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 4.0]], dtype=torch.float64)
    expected = [[1 - 4 / 3, 0 - 5 / 3, 0 - 5 / 3, 4 - 1 / 3]]
    torch.testing.assert_close(advantages.rloo(rewards), torch.tensor(expected, dtype=torch.float64))


def test_rloo_leaves_unscorable_samples_out_of_the_baseline() -> None:
    rewards = torch.tensor([[1.0, NAN, 0.0], [5.0, NAN, NAN], [NAN, NAN, NAN]])
    assert advantages.rloo(rewards).tolist() == [[1.0, 0.0, -1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


groups = hnp.arrays("float64", st.tuples(st.integers(1, 4), st.integers(2, 6)), elements=st.integers(-50, 50))


@given(groups)
def test_rloo_sums_to_zero_in_each_group_and_ignores_a_shift(values) -> None:
    rewards = torch.from_numpy(values)
    found = advantages.rloo(rewards)
    torch.testing.assert_close(found.sum(-1), torch.zeros(len(rewards), dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(advantages.rloo(rewards + 7), found)


@given(groups, st.randoms(use_true_random=False))
def test_rloo_follows_a_permutation_of_the_samples(values, random) -> None:
    rewards = torch.from_numpy(values)
    order = list(range(rewards.shape[1]))
    random.shuffle(order)
    torch.testing.assert_close(advantages.rloo(rewards[:, order]), advantages.rloo(rewards)[:, order])


def test_with_two_samples_the_advantages_are_opposite() -> None:
    found = advantages.rloo(torch.tensor([[0.3, 1.1], [2.0, -1.0]]))
    torch.testing.assert_close(found[:, 0], -found[:, 1])


def test_the_rloo_gradient_is_unbiased_and_a_baseline_with_the_sample_itself_is_not() -> None:
    """On a bandit with three arms the exact gradient of the expected reward is known."""
    generator = torch.Generator().manual_seed(0)
    logits, values = torch.tensor([0.2, -0.3, 0.5]).double(), torch.tensor([1.0, 0.0, 3.0]).double()
    probs = logits.softmax(0)
    exact = probs * (values - (probs * values).sum())
    draws = torch.multinomial(probs, 4 * 100_000, replacement=True, generator=generator).view(-1, 4)
    scores = torch.eye(3).double()[draws] - probs

    def estimate(weights):
        each = (weights.unsqueeze(-1) * scores).mean(1)
        return each.mean(0), each.std(0) / len(each) ** 0.5

    mean, error = estimate(advantages.rloo(values[draws]))
    assert ((mean - exact).abs() < 3 * error).all()
    biased, error = estimate(values[draws] - values[draws].mean(-1, keepdim=True))
    assert ((biased - exact).abs() > 3 * error).any()


def test_normalized_advantages_have_mean_0_and_deviation_1() -> None:
    found = advantages.normalize(torch.tensor([[1.0, -1.0], [3.0, 9.0]]), torch.tensor([[True, True], [True, False]]))
    counted = found.flatten()[:3]
    assert counted.mean().item() == pytest.approx(0, abs=1e-6)
    assert counted.std().item() == pytest.approx(1, abs=1e-6)
    assert found[1, 1] == 9


def test_kl_sums_over_the_completion_only() -> None:
    logps, reference = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.0, 0.0]])
    mask = torch.tensor([[True, True, False]])
    assert kl.sequence_k1(logps, reference, mask).tolist() == [-0.5]
    assert (kl.k3(logps, reference) >= 0).all()


@pytest.mark.parametrize("level", ["sequence", "sequence_mean", "token"])
def test_on_policy_the_gradient_is_reinforce(level) -> None:
    """With equal log-probs the ratio is 1 and d loss / d logp = -A (divided by the length at sequence_mean)."""
    logps = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    weights = torch.tensor([2.0, -1.0])
    made = clipped_surrogate(logps, logps.detach(), weights, mask, level, 0.2, 0.2)
    made.loss.sum().backward()
    lengths = torch.tensor([[2.0], [1.0]]) if level == "sequence_mean" else 1.0
    assert torch.allclose(logps.grad, -weights.unsqueeze(-1) * mask / lengths)
    assert made.clipped.tolist() == [0.0, 0.0]


def test_the_sequence_ratio_is_the_product_of_the_token_ratios() -> None:
    logps, old = torch.tensor([[-1.0, -2.0, 5.0]]), torch.tensor([[-1.2, -2.5, 0.0]])
    mask = torch.tensor([[True, True, False]])
    assert log_ratio(logps, old, mask, "sequence").item() == pytest.approx(0.7)
    assert log_ratio(logps, old, mask, "sequence_mean").item() == pytest.approx(0.35)
    assert log_ratio(logps, old, mask, "token")[0].tolist() == pytest.approx([0.2, 0.5, 0.0])


def test_the_clip_takes_the_gradient_only_where_it_would_go_further() -> None:
    old, mask = torch.zeros(4, 1), torch.ones(4, 1, dtype=torch.bool)
    logps = torch.tensor([[0.5], [0.5], [-0.5], [-0.5]], requires_grad=True)
    made = clipped_surrogate(logps, old, torch.tensor([1.0, -1.0, 1.0, -1.0]), mask, "sequence", 0.2, 0.3)
    made.loss.sum().backward()
    assert made.clipped.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert (logps.grad.flatten() != 0).tolist() == [False, True, True, False]
    assert made.loss[0].item() == pytest.approx(-1.3)
    assert made.loss[3].item() == pytest.approx(0.8)
