"""Losses of actions, their aggregation, the KL and the sampler's mismatch, in numbers worked out by hand."""

import pytest
import torch

from rloo_pipeline.algorithm import kl, mismatch
from rloo_pipeline.algorithm.loss import Bounds, Totals, aggregate, log_ratio, losses

MASK = torch.tensor([[True, True], [True, False]])
WIDE = Bounds(0.2, 0.2)


@pytest.mark.parametrize("clip", ["ppo", "cispo", "sapo", "dppo_tv", "vespo", "none"])
@pytest.mark.parametrize("level", ["sequence", "sequence_mean", "token"])
def test_on_policy_the_gradient_is_reinforce(level, clip) -> None:
    """With equal log-probs the ratio is 1 and d loss / d logp = -A (divided by the length for GSPO's mean in PPO)."""
    logps = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]], requires_grad=True)
    weights = torch.tensor([2.0, -1.0])
    result = losses(logps, logps.detach(), weights, MASK, level, clip, WIDE)
    result.loss.sum().backward()
    lengths = torch.tensor([[2.0], [1.0]]) if level == "sequence_mean" and clip in ("ppo", "sapo") else 1.0
    assert torch.allclose(logps.grad, -weights.unsqueeze(-1) * MASK / lengths)
    assert result.ratio.tolist() == [1.0, 1.0]
    assert [*result.low.tolist(), *result.high.tolist()] == [0.0] * 4


def test_the_sequence_ratio_is_the_product_of_the_token_ratios() -> None:
    logps, old = torch.tensor([[-1.0, -2.0, 5.0]]), torch.tensor([[-1.2, -2.5, 0.0]])
    mask = torch.tensor([[True, True, False]])
    assert log_ratio(logps, old, mask, "sequence").item() == pytest.approx(0.7)
    assert log_ratio(logps, old, mask, "sequence_mean").item() == pytest.approx(0.35)
    assert log_ratio(logps, old, mask, "token")[0].tolist() == pytest.approx([0.2, 0.5, 0.0])


@pytest.mark.parametrize("level", ["sequence", "sequence_mean", "token"])
def test_a_ratio_beyond_all_bounds_makes_no_nan(level) -> None:
    logps = torch.tensor([[200.0, 200.0]], requires_grad=True)
    result = losses(logps, torch.zeros(1, 2), torch.zeros(1), torch.ones(1, 2, dtype=torch.bool), level, "ppo", WIDE)
    result.loss.sum().backward()
    assert result.loss.sum().item() == 0
    assert logps.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("clip", ["ppo", "clip_cov", "kl_cov", "cispo", "sapo", "dppo_tv", "vespo", "none"])
@pytest.mark.parametrize("level", ["sequence", "sequence_mean", "token"])
def test_a_completion_without_a_token_in_the_loss_has_no_gradient_and_what_is_padding_no_loss(level, clip) -> None:
    """A completion that is left out has an empty mask."""
    logps = torch.tensor([[-1.0, 0.0], [-2.0, -0.5]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, False]])
    result = losses(logps, torch.full((2, 2), -1.5), torch.tensor([0.5, -3.0]), mask, level, clip, WIDE)
    result.loss.sum().backward()
    assert (logps.grad != 0).tolist() == [[clip not in ("ppo", "clip_cov"), False], [False, False]]
    if result.loss.shape[1] == 2:
        assert (result.loss != 0).tolist() == mask.tolist()
    assert all(values.isfinite().all() and not values.requires_grad for values in result[1:])


def one_token(clip, bounds, advantages=(1.0, -1.0, 1.0, -1.0)):
    """Four completions of one token whose ratios are e^0.5, e^0.5, e^-0.5, e^-0.5."""
    logps = torch.tensor([[0.5], [0.5], [-0.5], [-0.5]], requires_grad=True)
    mask = torch.ones(4, 1, dtype=torch.bool)
    result = losses(logps, torch.zeros(4, 1), torch.tensor(advantages), mask, "token", clip, bounds)
    result.loss.sum().backward()
    return result, logps.grad.flatten()


def test_the_clip_removes_the_gradient_only_where_the_ratio_would_move_further_out() -> None:
    result, gradient = one_token("ppo", Bounds(0.2, 0.3))
    assert result.high.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert result.low.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert (gradient != 0).tolist() == [False, True, True, False]
    assert result.loss[0].item() == pytest.approx(-1.3)
    assert result.loss[3].item() == pytest.approx(0.8)


def test_the_dual_clip_bounds_the_loss_of_a_bad_completion_that_became_likely() -> None:
    free, gradient = one_token("ppo", Bounds(0.2, 0.2))
    bound, bounded = one_token("ppo", Bounds(0.2, 0.2, delta=1.5))
    assert free.loss[1].item() == pytest.approx(torch.e**0.5)
    assert bound.loss[1].item() == pytest.approx(1.5)
    assert (gradient[1] != 0, bounded[1] != 0) == (True, False)
    assert torch.equal(bound.loss[[0, 2, 3]], free.loss[[0, 2, 3]])


def test_tokens_that_clip_cov_drops_count_as_clipped_above() -> None:
    logps, old, mask = torch.tensor([[-1.0, -1.0]]), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    dropped = torch.tensor([[True, False]])
    result = losses(logps, old, torch.tensor([-1.0]), mask, "token", "clip_cov", WIDE, dropped)
    assert result.loss[0].tolist() == pytest.approx([0.0, 0.8])
    assert (result.low.item(), result.high.item()) == (0.5, 0.5)


def test_cispo_cuts_the_weight_and_keeps_the_gradient() -> None:
    result, gradient = one_token("cispo", Bounds(0.2, 0.3))
    assert gradient.tolist() == pytest.approx([-1.3, 1.3, -(torch.e**-0.5), torch.e**-0.5])
    assert result.high.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_without_a_clip_there_is_no_ratio_in_the_gradient() -> None:
    _, gradient = one_token("none", Bounds(0.2, 0.3))
    assert gradient.tolist() == [-1.0, 1.0, -1.0, 1.0]


def test_each_token_can_have_an_advantage_of_its_own() -> None:
    logps = torch.zeros(1, 3, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    losses(logps, torch.zeros(1, 3), torch.tensor([[2.0, -1.0, 9.0]]), mask, "token", "ppo", WIDE).loss.sum().backward()
    assert logps.grad.tolist() == [[-2.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("mode", "of_tokens", "of_sequences"),
    [
        ("sequence", (1 + 2 + 4) / 2, (3 + 5) / 2),
        ("token_mean", (1 + 2 + 4) / 3, (3 * 2 + 5) / 3),
        ("sequence_mean_token_mean", (1.5 + 4) / 2, (3 + 5) / 2),
        ("sequence_mean_token_sum", (3 + 4) / 2, (6 + 5) / 2),
        ("sequence_mean_token_sum_norm", (3 + 4) / 10 / 2, (6 + 5) / 10 / 2),
    ],
)
def test_how_a_loss_is_aggregated(mode, of_tokens, of_sequences) -> None:
    totals = Totals(completions=2, tokens=3, longest=10)
    tokens, sequences = torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.tensor([[3.0], [5.0]])
    assert aggregate(tokens, MASK, mode, totals).item() == pytest.approx(of_tokens)
    assert aggregate(sequences, MASK, mode, totals).item() == pytest.approx(of_sequences)
    parts = [aggregate(tokens[[row]], MASK[[row]], mode, totals).item() for row in (0, 1)]
    assert sum(parts) == pytest.approx(of_tokens), "the sum over micro-batches is the whole"


def test_a_step_without_any_completion_has_loss_0_and_that_of_one_is_its_own() -> None:
    nothing = aggregate(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool), "token_mean", Totals(0, 0, 10))
    assert nothing.item() == 0
    for mode in ("sequence", "token_mean"):
        one = aggregate(torch.tensor([[3.0]]), torch.ones(1, 1, dtype=torch.bool), mode, Totals(1, 1, 10))
        assert one.item() == 3


def test_the_estimates_of_the_kl() -> None:
    logps, reference = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.0, 0.0]])
    mask = torch.tensor([[True, True, False]])
    estimates = {name: kl.estimate(name, logps, reference, mask)[0].tolist() for name in ("k1", "k2", "k3")}
    assert estimates["k1"] == [0.5, -1.0, 0.0]
    assert estimates["k2"] == [0.125, 0.5, 0.0]
    assert estimates["k3"] == pytest.approx([torch.e**-0.5 - 0.5, torch.e - 2, 0.0], abs=1e-6)


@pytest.mark.parametrize(("name", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_k1_and_k3_are_unbiased_as_values_and_k2_is_not(name, unbiased) -> None:
    logps, reference = torch.tensor([0.1, -0.9, 0.4]).log_softmax(0), torch.tensor([-0.6, 0.5, 0.2]).log_softmax(0)
    exact = (logps.exp() * (logps - reference)).sum()
    mean = (logps.exp() * kl.estimate(name, logps, reference, torch.ones(3, dtype=torch.bool))).sum()
    assert (abs(mean - exact) < 1e-6) == unbiased


@pytest.mark.parametrize(("name", "right"), [("k1", False), ("k2", True), ("k3", False)])
def test_in_a_loss_the_gradient_of_k2_is_that_of_the_kl(name, right) -> None:
    """On samples of π, weighted by π without a gradient; that of k1 is 0, that of k3 belongs to KL(π_ref‖π)."""
    logits = torch.tensor([0.1, -0.9, 0.4], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.6, 0.5, 0.2]).double().log_softmax(0)
    logps = logits.log_softmax(0)
    exact = torch.autograd.grad((logps.exp() * (logps - reference)).sum(), logits, retain_graph=True)[0]
    tokens = kl.estimate(name, logps, reference, torch.ones(3, dtype=torch.bool))
    gradient = torch.autograd.grad((logps.exp().detach() * tokens).sum(), logits)[0]
    assert torch.allclose(gradient, exact) == right
    if name == "k1":
        assert gradient.abs().max() < 1e-12


def test_the_reward_to_go_is_the_sum_from_each_token_on() -> None:
    assert kl.reward_to_go(torch.tensor([[1.0, 2.0, 4.0]])).tolist() == [[7.0, 6.0, 4.0]]


@pytest.mark.parametrize(("measured", "factor"), [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (0.0, 0.98)])
def test_beta_moves_towards_the_target_by_a_bounded_factor(measured, factor) -> None:
    assert kl.adapt_beta(0.05, measured, 6.0, 0.1) == pytest.approx(0.05 * factor)


TRAINER = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]])
SAMPLER = torch.tensor([[-1.5, -1.0, 7.0], [-1.0, -1.0, -1.0]])
TOKENS = torch.tensor([[True, True, False], [True, True, True]])


@pytest.mark.parametrize(
    ("correction", "first", "second"),
    [
        ("token_tis", [1.2, torch.e**-1, 0.0], [1.0, 1.0, 1.0]),
        ("token_mis", [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
        ("sequence_tis", [torch.e**-0.5], [1.0]),
        ("sequence_mis", [torch.e**-0.5], [1.0]),
        ("sequence_mean_mis", [1.0], [1.0]),
    ],
)
def test_importance_weights_are_truncated_or_dropped(correction, first, second) -> None:
    low = None if correction.endswith("tis") else 0.5
    result = mismatch.weights(TRAINER, SAMPLER, TOKENS, correction, low, 1.2).weight.tolist()
    assert result[0] == pytest.approx(first)
    assert result[1] == second


def test_a_lower_threshold_truncates_too_and_weights_have_no_gradient() -> None:
    trainer = TRAINER.clone().requires_grad_()
    truncated, outside = mismatch.weights(trainer, SAMPLER, TOKENS, "token_tis", 0.5, None)
    assert truncated[0].tolist() == pytest.approx([torch.e**0.5, 0.5, 0.0])
    assert outside.tolist() == [[False, True, False], [False] * 3]
    rejection = mismatch.Rejection("token", 0.5, None)
    rejected, outside = mismatch.weights(trainer, SAMPLER, TOKENS, "sequence_tis", None, 0.5, rejection)
    assert [*rejected[0].tolist(), *rejected[1].tolist()] == pytest.approx([0.5, 0.0, 0.0, 0.5, 0.5, 0.5])
    assert outside.tolist() == TOKENS.tolist()
    assert (truncated.requires_grad, rejected.requires_grad) == (False, False)


def test_what_is_truncated_or_dropped_is_counted() -> None:
    result = mismatch.weights(TRAINER, SAMPLER, TOKENS, "token_mis", 0.5, 1.2).outside
    assert result.tolist() == [[True, True, False], [False, False, False]]
    assert mismatch.weights(TRAINER, SAMPLER, TOKENS, "sequence_tis", 0.7, None).outside.tolist() == [[True], [False]]


def test_the_geometric_mean_judges_completions_of_all_lengths_alike() -> None:
    """Each token of three completions is e^0.01, e^-0.05 and 1 times as likely; the product of 4,096 is e^41."""
    shift = torch.tensor([[0.01], [-0.05], [0.0]]).expand(3, 4096)
    mask = torch.arange(4096) < torch.tensor([[4096], [30], [4096]])
    result = mismatch.weights(shift, torch.zeros(3, 4096), mask, "sequence_mean_mis", 0.98, 1.02)
    assert result.weight.tolist() == [[1.0], [0.0], [1.0]]
    assert result.outside.tolist() == [[False], [True], [False]]
    product = mismatch.weights(shift, torch.zeros(3, 4096), mask, "sequence_mis", 0.1, 10.0)
    assert product.weight.flatten().tolist() == pytest.approx([0.0, torch.e**-1.5, 1.0])


@pytest.mark.parametrize("correction", ["token_tis", "sequence_tis", "token_mis", "sequence_mis"])
@pytest.mark.parametrize("difference", [100.0, -100.0])
def test_a_weight_without_an_upper_threshold_is_bounded_as_ratios_are(correction, difference) -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    result = mismatch.weights(torch.zeros(1, 2), torch.full((1, 2), -difference), mask, correction, 1e-12, None).weight
    assert (result * 0.0 == 0).all(), "a loss of 0 stays 0"
    assert result.flatten().tolist() == pytest.approx([torch.e ** (20 if difference > 0 else -20)] * result.numel())


def test_the_gap_between_sampler_and_trainer() -> None:
    gap = mismatch.gap(TRAINER, SAMPLER, TOKENS)
    assert gap.absolute.tolist() == [1.5, 0.0]
    assert gap.largest.tolist() == [1.0, 0.0]
    assert gap.log_weight.tolist() == [-0.5, 0.0]
    assert gap.kl[0].item() == pytest.approx((torch.e**0.5 - 1.5) + (torch.e**-1 - 0.0))
    assert gap.outside.tolist() == [1, 0]
    weights = [torch.e**0.5, torch.e**-1]
    assert gap.weight.tolist() == pytest.approx([sum(weights), TOKENS[1].sum().item()])
    assert gap.weight_square.tolist() == pytest.approx([sum(w * w for w in weights), TOKENS[1].sum().item()])
    at_the_band = torch.tensor([[0.49, 0.51, 1.99, 2.01]]).log().requires_grad_()
    of_band = mismatch.gap(at_the_band, torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool))
    assert of_band.outside.tolist() == [2]
    assert not any(values.requires_grad for values in of_band)
    large_gap = mismatch.gap(torch.zeros(1, 1), torch.full((1, 1), -100.0), torch.ones(1, 1, dtype=torch.bool))
    assert large_gap.kl.isfinite().all()


def test_the_effective_sample_size_is_the_share_that_the_weights_leave() -> None:
    assert mismatch.effective_sample_size(torch.zeros(5)).item() == pytest.approx(1)
    assert mismatch.effective_sample_size(torch.tensor([0.0, -1000.0, -1000.0, -1000.0])).item() == pytest.approx(0.25)
    of_1_and_3 = torch.tensor([1.0, 3.0], dtype=torch.float64).log()
    assert mismatch.effective_sample_size(1000 + of_1_and_3).item() == pytest.approx(4**2 / (2 * 10))
