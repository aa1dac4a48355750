"""Advantage estimators: rewards of [prompts, K] in, advantages of the same shape out; NaN marks an unscorable sample.

Each function decorated with a mark such as `@estimator` can be named in `algorithm.advantage`; the configuration reads
the names of functions and marks from this file without importing it (`config.algorithm.MARKS`). A formula may return
NaN where it is undefined (an unscorable sample, no sibling to compare with); the advantage is 0 there. R_i are the
rewards of a prompt's samples; means and standard deviations are over its scorable samples.
"""

from collections.abc import Callable
from functools import update_wrapper

import torch
from jaxtyping import Float
from torch import Tensor

from rloo_pipeline.algorithm import nan_stats

Formula = Callable[[Float[Tensor, "prompts K"]], Float[Tensor, "prompts K"]]


class Estimator:
    """An advantage estimator.

    Attributes:
        formula: rewards to advantages, NaN where undefined.
        whitened: True if the result is standardized over the whole batch.
        of_success: True if the formula is only defined for rewards of 0 and 1.
    """

    def __init__(self, formula: Formula, whitened: bool = False, of_success: bool = False) -> None:
        self.formula, self.whitened, self.of_success = formula, whitened, of_success
        update_wrapper(self, formula)

    def __call__(self, rewards: Float[Tensor, "prompts K"]) -> Float[Tensor, "prompts K"]:
        """Advantages, 0 where the formula is undefined."""
        advantages = self.formula(rewards)
        return (nan_stats.whiten(advantages) if self.whitened else advantages).nan_to_num(0.0)


def estimator(formula: Formula) -> Estimator:
    """Marks an estimator."""
    return Estimator(formula)


def whitened(formula: Formula) -> Estimator:
    """Marks an estimator whose advantages are standardized to mean 0 and standard deviation 1 over the whole batch.

    The batch is all completions, or all tokens where each token has its own advantage (`kl.placement: token_reward`).
    """
    return Estimator(formula, whitened=True)


def divided(formula: Formula) -> Estimator:
    """Marks an estimator that divides by the spread of a group; only the configuration reads this mark.

    Its rewards must not contain penalties: if all scores were equal, the spread would come from the
    penalties alone.
    """
    return Estimator(formula)


def batch_baseline(formula: Formula) -> Formula:
    """Marks an estimator whose baseline is the batch's; place it below another mark.

    Groups of equal rewards then have a signal, so the configuration refuses to filter or replace them. Only the
    configuration reads this mark.
    """
    return formula


def has_batch_baseline(formula: Formula, samples: int) -> bool:
    """True if groups of `samples` equal rewards get non-zero advantages, as they do if the baseline is the batch's."""
    equal = torch.tensor([[0.0], [1.0]], dtype=torch.float64).repeat(1, samples)
    return bool(formula(equal).nan_to_num(0.0).any())


def enlarges_penalties(formula: Formula, samples: int) -> bool:
    """True if a penalty of 0.01 in a group of `samples` equal rewards changes advantages by more than a tenth of what a
    reward of 0 among ones does, as it does if the formula divides by the spread of the group, or ranks.
    """
    rewards = torch.ones((2, samples), dtype=torch.float64)
    rewards[0, 0], rewards[1, 0] = 0.99, 0.0
    lowest, highest = formula(rewards).nan_to_num(0.0).aminmax(dim=1)
    penalised, wrong = highest - lowest
    return bool(penalised > 0.1 * wrong)


def of_success(formula: Formula) -> Estimator:
    """Marks an estimator that is defined for rewards of 0 and 1 only; other rewards are an error."""
    return Estimator(formula, of_success=True)


@estimator
def rloo(rewards: Float[Tensor, "prompts K"]) -> Float[Tensor, "prompts K"]:
    """REINFORCE leave-one-out: A_i = R_i − mean_{j≠i} R_j.

    Ahmadian et al. 2024 (arXiv 2402.14740), section 2.3; Kool et al. 2019. The baseline of a sample never contains the
    sample itself, so the gradient estimate is unbiased. 0 in groups with fewer than two scorable samples.
    """
    return _minus_siblings(rewards)


@divided
def rloo_std(rewards: Float[Tensor, "prompts K"]) -> Float[Tensor, "prompts K"]:
    """RLOO divided by the spread of the siblings: A_i = (R_i − mean_{j≠i} R_j) / (std_{j≠i} R_j + ε).

    NeMo-RL with use_leave_one_out_baseline and normalize_rewards (its ε is 1e-6). As in NeMo-RL, a sample whose
    siblings are all equal is not divided. Neither moment contains the sample itself.
    """
    siblings, centred = nan_stats.siblings(rewards), _minus_siblings(rewards)
    std, rounding = nan_stats.std(siblings).squeeze(-1), nan_stats.rounding(siblings).squeeze(-1)
    return torch.where(std > rounding, centred / (std + nan_stats.STD_EPSILON), centred)


@divided
def grpo(rewards: Float[Tensor, "prompts K"]) -> Float[Tensor, "prompts K"]:
    """GRPO: A_i = (R_i − mean R) / (std R + ε). Shao et al. 2024 (arXiv 2402.03300), section 4.1.2.

    The mean contains the sample itself, and the division gives prompts with a small spread a larger weight.
    """
    return nan_stats.centred(rewards) / (nan_stats.std(rewards) + nan_stats.STD_EPSILON)


@estimator
def dr_grpo(rewards: Float[Tensor, "prompts K"]) -> Float[Tensor, "prompts K"]:
    """Dr. GRPO: A_i = R_i − mean R. Liu et al. 2025 (arXiv 2503.20783), section 3.2.

    RLOO times (K − 1)/K if all K samples are scorable.
    """
    return _minus_mean(rewards)


@whitened
@batch_baseline
def reinforce_pp(rewards: Float[Tensor, "prompts K"]) -> Float[Tensor, "prompts K"]:
    """REINFORCE++: no group baseline, A_i = (R_i − mean over the batch) / std over the batch.

    Hu et al. 2025 (arXiv 2501.03262), section 3.1.
    """
    return rewards


@whitened
def reinforce_pp_baseline(rewards: Float[Tensor, "prompts K"]) -> Float[Tensor, "prompts K"]:
    """REINFORCE++-baseline: R_i − mean R of its group, then standardized over the batch.

    Hu et al. 2025 (arXiv 2501.03262), section 3.2.
    """
    return _minus_mean(rewards)


@of_success
def maxrl(rewards: Float[Tensor, "prompts K"]) -> Float[Tensor, "prompts K"]:
    """MaxRL: A_i = (R_i − mean R) / mean R, for rewards of 0 and 1; 0 in groups without success.

    Tajwar et al. 2026 (arXiv 2602.02710): in expectation the gradient of log p(success), expanded in powers of 1 − p to
    order K − 1. RLOO is the first order of that expansion, the gradient of p itself.
    """
    centred, mean = _minus_mean(rewards), nan_stats.mean(rewards)
    return torch.where(mean > 0, centred / mean, centred)


def _minus_mean(rewards: Float[Tensor, "prompts K"]) -> Float[Tensor, "prompts K"]:
    """A sample's reward minus its group's mean; NaN if the group has no other scorable sample."""
    return torch.where(nan_stats.count(rewards) > 1, nan_stats.centred(rewards), torch.nan)


def _minus_siblings(rewards: Float[Tensor, "prompts K"]) -> Float[Tensor, "prompts K"]:
    """A sample's reward minus the mean of its scorable siblings'; NaN without such siblings."""
    return (rewards.unsqueeze(-1) - nan_stats.siblings(rewards)).nanmean(-1)
