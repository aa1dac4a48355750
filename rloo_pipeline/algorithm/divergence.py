"""Divergence of two distributions over a vocabulary, one of which is known only on its K likeliest tokens.

All other tokens count as one: with the teacher's p and the student's q on the K tokens and r = 1 − Σ of each, both are
distributions over K + 1 outcomes (TRL's `loss_top_k` with `loss_add_tail`; the tokens are the teacher's, as in verl's
`forward_kl_topk` and NeMo-RL's `DistillationLossFn`). By the data-processing inequality their divergence is at most
that of the whole distributions, and equal to it if K is the vocabulary. Agarwal et al. 2024 (GKD, arXiv 2306.13649):

    β = 1        KL(q‖p), reverse
    β = 0        KL(p‖q), forward
    0 < β < 1    β KL(p‖m) + (1 − β) KL(q‖m), m = βp + (1 − β)q    (equation 1)
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

LEAST_REST = 1e-6
"""Lower bound on the probability of all other tokens, which has an error near 1e-7 in float32."""
_ABSENT = -1e4
"""A finite log-prob whose exponential is 0, so that 0 times it is 0."""


def of_top(
    logps: Float[Tensor, "*tokens K"], teacher_logps: Float[Tensor, "*tokens K"], beta: float
) -> Float[Tensor, "*tokens"]:
    """The divergence at each position in nats, with its gradient with respect to the student's log-probs.

    Args:
        logps: the student's log-probs of the teacher's likeliest tokens. Tokens that it never samples belong to the
            rest.
        teacher_logps: the teacher's log-probs. Tokens that it never samples, and those that the student lacks (−inf),
            belong to the rest too.
        beta: β, the kind of divergence, as above.
    """
    known = (teacher_logps > _ABSENT) & (logps > _ABSENT)
    student, teacher = (_with_rest(values, known) for values in (logps, teacher_logps))
    if beta == 1:
        result = _kl(student, teacher)
    elif beta == 0:
        result = _kl(teacher, student)
    else:
        mean = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        result = beta * _kl(teacher, mean) + (1 - beta) * _kl(student, mean)
    return result.to(logps.dtype)


def _with_rest(logps: Tensor, known: Tensor) -> Tensor:
    """Log-probs in float64, with the log-prob of all other tokens appended."""
    values = torch.where(known, logps.double(), _ABSENT)
    rest = (1 - values.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST).log()
    return torch.cat([values, rest], -1)


def _kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(-1)
