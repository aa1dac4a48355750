"""Advantage estimators: `[prompts, samples]` rewards in, advantages of the same shape out. NaN = unscorable.

Each function under `@estimator` can be named in `algorithm.advantage`; a new one is one function here. Its formula may
give NaN where it has no meaning (an unscorable sample, no sibling to compare with): what comes out is 0 there.
R_i are the rewards of a prompt's samples, means and standard deviations are over its scorable ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper

import torch

from rloo_pipeline.algorithm import nan_stats
from rloo_pipeline.algorithm.shapes import PerSample

Formula = Callable[[PerSample], PerSample]


class Estimator:
    """An estimator: its formula, whether its result is standardized over the batch, and NaN made 0."""

    def __init__(self, formula: Formula, whitened: bool = False, of_success: bool = False) -> None:
        self.formula, self.whitened, self.of_success = formula, whitened, of_success
        update_wrapper(self, formula)

    def __call__(self, rewards: PerSample) -> PerSample:
        """The advantages, none of them NaN."""
        found = self.formula(rewards)
        return (nan_stats.whiten(found) if self.whitened else found).nan_to_num(0.0)


def estimator(formula: Formula) -> Estimator:
    """Marks a formula as an estimator."""
    return Estimator(formula)


def whitened(formula: Formula) -> Estimator:
    """Marks a formula as an estimator whose advantages get mean 0 and standard deviation 1 over the whole batch: over
    completions, or over tokens where each has an advantage of its own (kl.placement: token_reward).
    """
    return Estimator(formula, whitened=True)


def divided(formula: Formula) -> Estimator:
    """Marks a formula that divides by the spread of a group. The configuration keeps penalties out of its rewards:
    where the scores are equal they would be all that there is to divide by.
    """
    return Estimator(formula)


def of_success(formula: Formula) -> Estimator:
    """Marks a formula that has a meaning for rewards of 0 and 1 alone; others are refused."""
    return Estimator(formula, of_success=True)


@estimator
def rloo(rewards: PerSample) -> PerSample:
    """REINFORCE leave-one-out: A_i = R_i − mean_{j≠i} R_j.

    Ahmadian et al. 2024 (arXiv 2402.14740), section 2.3; Kool et al. 2019. The baseline of a sample never contains the
    sample itself, so the gradient estimate is unbiased. 0 in groups with fewer than two scorable samples.
    """
    return _less_others(rewards)


@divided
def rloo_std(rewards: PerSample) -> PerSample:
    """RLOO divided by the siblings' own spread: A_i = (R_i − mean_{j≠i} R_j) / (std_{j≠i} R_j + ε).

    NeMo-RL with use_leave_one_out_baseline and normalize_rewards (its ε is 1e-6); there, too, a sample whose siblings
    are all equal is not divided. Neither moment contains the sample itself.
    """
    others, centred = nan_stats.others(rewards), _less_others(rewards)
    std, rounding = nan_stats.std(others).squeeze(-1), nan_stats.rounding(others).squeeze(-1)
    return torch.where(std > rounding, centred / (std + nan_stats.STD_EPSILON), centred)


@divided
def grpo(rewards: PerSample) -> PerSample:
    """GRPO: A_i = (R_i − mean R) / (std R + ε). Shao et al. 2024 (arXiv 2402.03300), section 4.1.2.

    The mean contains the sample itself, and the division weighs prompts by how settled they are.
    """
    return nan_stats.centred(rewards) / (nan_stats.std(rewards) + nan_stats.STD_EPSILON)


@estimator
def dr_grpo(rewards: PerSample) -> PerSample:
    """Dr. GRPO: A_i = R_i − mean R. Liu et al. 2025 (arXiv 2503.20783), section 3.2.

    RLOO times (K − 1)/K where all K samples are scorable.
    """
    return nan_stats.centred(rewards)


@whitened
def reinforce_pp(rewards: PerSample) -> PerSample:
    """REINFORCE++: no group baseline, A_i = (R_i − mean over the batch) / std over the batch.

    Hu et al. 2025 (arXiv 2501.03262), section 3.1.
    """
    return rewards


@whitened
def reinforce_pp_baseline(rewards: PerSample) -> PerSample:
    """REINFORCE++-baseline: R_i − mean R of its group, then standardized over the batch.

    Hu et al. 2025 (arXiv 2501.03262), section 3.2.
    """
    return torch.where(nan_stats.count(rewards) > 1, nan_stats.centred(rewards), torch.nan)


@of_success
def maxrl(rewards: PerSample) -> PerSample:
    """MaxRL: A_i = (R_i − mean R) / mean R, for rewards of 0 and 1; 0 in groups without success.

    Tajwar et al. 2026 (arXiv 2602.02710): in expectation the gradient of log p(success) expanded in powers of 1 − p to
    order K − 1; RLOO stops at the first order, which is the gradient of p itself.
    """
    mean = nan_stats.mean(rewards)
    return torch.where(mean > 0, nan_stats.centred(rewards) / mean, rewards - rewards)


def _less_others(rewards: PerSample) -> PerSample:
    """A sample's reward less the mean of its scorable siblings'; NaN where it has none."""
    return (rewards.unsqueeze(-1) - nan_stats.others(rewards)).nanmean(-1)
