"""Proves that completions were sampled from the policy that they claim.

The sampler (vLLM) gives the log-prob of each token that it samples. The trainer's model of the same policy gives nearly
the same log-probs; only rounding differs. So their mean absolute difference, in nats per token, shows if vLLM had that
policy with its whole adapter. The largest allowed difference is

    max(rounding of the number format, TIMES × the difference of policy 0 in checks.json)

plus `ERRORS` standard errors, since a round is a sample. The standard error is that of the ratio Σ|d| / Σ tokens over
completions (Cochran 1977, section 6.3), so a few tokens that rounding sends to other experts raise no alarm.

With truncated or masked sampling (top_p, top_k, min_p, masks of `rollout.generation_kwargs`), the sampler's log-prob is
that of the whole distribution minus the log of the remaining mass, so it is at least as high. Then only the amount by
which the trainer's log-prob exceeds it counts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config.sampling import FP8
from rloo_pipeline.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

    from rloo_pipeline.config import Config

ROUNDING = {"float32": 1e-4, "bfloat16": 0.04, "float16": 0.02, FP8: 0.35}
"""Largest mean difference by rounding, in nats per token, in random models (see the check `logprob_difference`)."""
EXPERTS = 4
"""Factor on `ROUNDING` for mixtures of experts, if policy 0 was not measured."""
TIMES, ERRORS = 3.0, 4.0
CHECK = "logprob_difference"
"""Name of the same check of policy 0. In `checks.accept`, it accepts later differences too."""
KEY = "sampler_difference"
"""Key of checks.json: the difference of policy 0 in nats per token; null if its sampling was truncated."""

FORMAT = "sampler_format"
"""Key of checks.json: number format of the engine that sampled then, if it is not that of the policy."""


class SamplerDifference(NamedTuple):
    """Difference between the sampler's log-probs and the trainer's."""

    mean: float
    """Mean absolute difference in nats per token."""
    error: float
    """Standard error of `mean`; infinite for a single completion."""
    tokens: int


class Bound(NamedTuple):
    """Largest allowed difference."""

    nats: float
    explained: str
    """Reasons for this bound, for the message."""


def difference(absolute: Float[Tensor, " completions"], tokens: Float[Tensor, " completions"]) -> SamplerDifference:
    """The difference over some completions.

    Args:
        absolute: Σ_t |log π_trainer − log π_sampler| of each completion.
        tokens: number of sampled tokens of each completion.
    """
    absolute, tokens = absolute.double(), tokens.double()
    count, total = len(absolute), float(tokens.sum())
    mean = float(absolute.sum()) / total
    if count < 2:
        return SamplerDifference(mean, math.inf, int(total))
    squares = float((absolute - mean * tokens).square().sum())
    return SamplerDifference(mean, math.sqrt(squares * count / (count - 1)) / total, int(total))


def of_lists(trainer: list[list[float]], sampler: list[list[float]], truncated: bool) -> SamplerDifference:
    """The difference for lists of log-probs by completion and token; `truncated` sampling counts as described above."""
    sums, tokens = [], []
    for own, other in zip(trainer, sampler, strict=True):
        values = torch.tensor(own, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)
        sums.append(float(values.clamp(min=0).sum() if truncated else values.abs().sum()))
        tokens.append(len(own))
    return difference(torch.tensor(sums), torch.tensor(tokens))


def bound(policy: Policy, number_format: str, temperature: float, checks: Path) -> Bound:
    """The largest allowed difference for a policy's completions.

    Args:
        policy: the policy.
        number_format: the sampler's number format.
        temperature: sampling temperature, which divides logits and their rounding; 0 counts as 1.
        checks: checks.json of the run.
    """
    found = read_json(checks)
    measured = found.get(KEY) if found.get(FORMAT, number_format) == number_format else None
    experts = measured is None and policy.has_experts
    rounding = ROUNDING[number_format] * (EXPERTS if experts else 1) / min(temperature or 1.0, 1.0)
    return Bound(
        math.inf if CHECK in found.get("accept", ()) else max(rounding, TIMES * (measured or 0.0)),
        f"{rounding:.2g} by {number_format}{' and experts' if experts else ''}, "
        + ("nothing measured for policy 0" if measured is None else f"{measured:.2g} measured for policy 0"),
    )


def require(found: SamplerDifference, allowed: Bound, policy: Policy, what: str, remedy: str) -> None:
    """Refuses completions that a policy did not sample.

    Args:
        found: measured difference.
        allowed: largest allowed difference.
        policy: the policy.
        what: name of the completions, for the message.
        remedy: advice for the message.

    Raises:
        UserError: the difference is too large.
    """
    if not found.mean - ERRORS * found.error > allowed.nats:
        return
    raise UserError(
        f"{what} are not of {policy}: the sampler's log-probs are {found.mean:.2g} nats a token from the trainer's "
        f"(over {found.tokens} tokens), and at most {allowed.nats:.2g} is explained ({allowed.explained}); the likely "
        f"cause: {_cause(policy)}; {remedy}"
    )


def require_evaluation(
    config: Config, policy: Policy, table: pa.Table, logps: list[list[float]], completions: Path, checks: Path
) -> SamplerDifference:
    """Refuses completions of an evaluation that are not of a policy.

    Args:
        config: with the sections `model`, `evaluation` and `rollout`.
        policy: the policy.
        table: all or some of the completions.
        logps: the trainer's log-probs of them.
        completions: their file.
        checks: checks.json of the run.

    Returns:
        The difference.

    Raises:
        UserError: it is larger than what is explained.
    """
    found = of_lists(logps, table["sampling_logps"].to_pylist(), config.rollout.masked_by is not None)
    allowed = bound(policy, config.model.dtype, config.evaluation.temperature, checks)
    require(found, allowed, policy, f"the completions in {completions}", remedy(completions.parent))
    return found


def remedy(folder: Path) -> str:
    """Advice on samples that another policy made; `folder` holds them."""
    return f"delete {folder} and run again; to train in spite of it, set checks.accept: [{CHECK}]"


def _cause(policy: Policy) -> str:
    """The usual reason for which a sampler serves another policy."""
    if policy.is_adapter:
        return "vLLM does not apply all modules of the adapter (update.lora.target_modules), or kept an older adapter"
    if policy.folder.name.isdigit() and int(policy.folder.name) > 0:
        return "an engine that stayed alive kept the weights of an older policy, or vLLM quantizes them"
    return "the folder has another revision of the model than it had for the sampler, or vLLM quantizes its weights"
