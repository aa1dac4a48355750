"""Proof that completions are samples of the policy that they are said to be of.

The sampler (vLLM) gives the log-prob of each token that it samples. The trainer's model of the same policy gives the
same tokens nearly the same log-probs: what differs is rounding. So their mean absolute difference, in nats a token,
tells whether vLLM had that policy, all of its adapter included. It may be

    max(what rounding in the number format explains, TIMES × the difference of policy 0 in checks.json)

and `ERRORS` of its standard errors more, since a round is a sample. The standard error is of the ratio Σ|d| / Σ tokens
over completions (Cochran 1977, section 6.3), so a few tokens that rounding sends to other experts raise no alarm.

Where sampling was truncated (top_p, top_k, min_p), the sampler's log-prob is that of the whole distribution minus the
log of the mass that is left, which is at least as high. Only what the trainer's is above it counts there.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rloo_pipeline.artifacts import model_dims, policy
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

    from rloo_pipeline.config import Config

ROUNDING = {"float32": 1e-4, "bfloat16": 0.04, "float16": 0.02}
"""Largest mean difference by rounding in nats a token, of random models (`check_limits.LOGPROB_LIMITS`)."""
EXPERTS = 4
"""The same of mixtures of experts, as a multiple, where policy 0 was not measured."""
TIMES, ERRORS = 3.0, 4.0
CHECK = "logprob_difference"
"""The same check of policy 0. Its name in `checks.accept` accepts later differences too."""
KEY = "sampler_difference"
"""In checks.json: the difference of policy 0 in nats a token; null if its distribution was truncated."""


class SamplerDifference(NamedTuple):
    """How far the sampler's log-probs are from the trainer's."""

    mean: float
    """Nats a token."""
    error: float
    """Standard error of `mean`; infinite for a single completion."""
    tokens: int


class Bound(NamedTuple):
    """How far they may be."""

    nats: float
    explained: str
    """By what, for the message."""


def difference(absolute: Float[Tensor, " completions"], tokens: Float[Tensor, " completions"]) -> SamplerDifference:
    """The difference over some completions.

    Args:
        absolute: Σ_t |log π_trainer − log π_sampler| of each.
        tokens: sampled tokens of each.
    """
    absolute, tokens = absolute.double(), tokens.double()
    count, total = len(absolute), float(tokens.sum())
    mean = float(absolute.sum()) / total
    if count < 2:
        return SamplerDifference(mean, math.inf, int(total))
    squares = float((absolute - mean * tokens).square().sum())
    return SamplerDifference(mean, math.sqrt(squares * count / (count - 1)) / total, int(total))


def of_lists(trainer: list[list[float]], sampler: list[list[float]], truncated: bool) -> SamplerDifference:
    """The difference of log-probs by completion and token; `truncated` as in the module's docstring."""
    sums, tokens = [], []
    for own, other in zip(trainer, sampler, strict=True):
        values = torch.tensor(own, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)
        sums.append(float(values.clamp(min=0).sum() if truncated else values.abs().sum()))
        tokens.append(len(own))
    return difference(torch.tensor(sums), torch.tensor(tokens))


def bound(folder: Path, dtype: str, temperature: float, checks: Path) -> Bound:
    """The largest difference of a policy's completions that is no alarm.

    Args:
        folder: of the policy.
        dtype: number format of sampler and trainer.
        temperature: of the samples, which divides logits and their rounding; 0 counts as 1.
        checks: checks.json of the run.
    """
    found = read_json(checks)
    measured = found.get(KEY)
    experts = measured is None and model_dims.experts_key(read_json(policy.base_of(folder) / "config.json")) is not None
    rounding = ROUNDING[dtype] * (EXPERTS if experts else 1) / min(temperature or 1.0, 1.0)
    return Bound(
        math.inf if CHECK in found.get("accept", ()) else max(rounding, TIMES * (measured or 0.0)),
        f"{rounding:.2g} by {dtype}{' and experts' if experts else ''}, "
        + ("nothing measured for policy 0" if measured is None else f"{measured:.2g} measured for policy 0"),
    )


def require(found: SamplerDifference, allowed: Bound, folder: Path, what: str, remedy: str) -> None:
    """Refuses completions that are not of a policy.

    Args:
        found: the difference of some of them.
        allowed: what is no alarm.
        folder: of the policy.
        what: the completions, for the message.
        remedy: what to do.

    Raises:
        UserError: the difference is larger.
    """
    if not found.mean - ERRORS * found.error > allowed.nats:
        return
    raise UserError(
        f"{what} are not of {folder}: the sampler's log-probs are {found.mean:.2g} nats a token from the trainer's "
        f"(over {found.tokens} tokens), and at most {allowed.nats:.2g} is explained ({allowed.explained}); the likely "
        f"cause: {_cause(folder)}; {remedy}"
    )


def require_evaluation(
    config: Config, folder: Path, table: pa.Table, logps: list[list[float]], completions: Path, checks: Path
) -> SamplerDifference:
    """Refuses completions of an evaluation that are not of a policy.

    Args:
        config: with the sections `model` and `evaluation`.
        folder: of the policy.
        table: all or some of the completions.
        logps: the trainer's log-probs of them.
        completions: their file.
        checks: checks.json of the run.

    Returns:
        The difference.

    Raises:
        UserError: it is larger than what is explained.
    """
    found = of_lists(logps, table["sampling_logps"].to_pylist(), truncated=False)
    allowed = bound(folder, config.model.dtype, config.evaluation.temperature, checks)
    require(found, allowed, folder, f"the completions in {completions}", remedy(completions.parent))
    return found


def remedy(folder: Path) -> str:
    """What to do about samples in a folder that are of another policy."""
    return f"delete {folder} and run again; to train in spite of it, set checks.accept: [{CHECK}]"


def _cause(folder: Path) -> str:
    """What usually makes a sampler serve another policy."""
    if policy.is_adapter(folder):
        return "vLLM does not apply all modules of the adapter (update.lora.target_modules), or kept an older adapter"
    if folder.name.isdigit() and int(folder.name) > 0:
        return "an engine that stayed alive kept the weights of an older policy, or vLLM quantizes them"
    return "the folder has another revision of the model than it had for the sampler, or vLLM quantizes its weights"
