"""Proves that completions were sampled from the policy that they name.

The sampler (vLLM) gives the log-prob of each token that it samples. The trainer's model of the same policy gives nearly
the same log-probs; only rounding differs. So their mean absolute difference, in nats per token, shows whether vLLM had
that policy with its whole adapter. The largest allowed difference is

    max(rounding of the number format, TIMES × the difference of policy 0 in checks.json)

plus `ERRORS` standard errors, since a round is a sample. This is the standard error of the ratio Σ|d| / Σ tokens over
completions (Cochran 1977, section 6.3), so a few tokens that rounding sends to different experts raise no alarm.

With truncated or masked sampling (top_p, top_k, min_p, masks of `rollout.generation_kwargs`), the sampler's log-prob is
that of the whole distribution minus the log of the remaining mass, so it is at least as high. Then only the amount by
which the trainer's log-prob exceeds it counts.
"""

import math
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.round_tables import RoundFiles
from rloo_pipeline.config import FP8, Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.training import forward_only, round_data
from rloo_pipeline.training.deepspeed_internals import split_model
from rloo_pipeline.training.engine import Engine

ROUNDING = {"float32": 1e-4, "bfloat16": 0.04, "float16": 0.02, FP8: 0.35}
"""Largest mean difference by rounding, in nats per token, in random models (see the check `logprob_difference`)."""
EXPERTS = 4
"""Factor on `ROUNDING` for mixtures of experts, if policy 0 was not measured."""
TIMES, ERRORS = 3.0, 4.0
CHECK = "logprob_difference"
"""Name of this check for policy 0. If it is in `checks.accept`, later differences are accepted too."""
KEY = "sampler_difference"
"""Key of checks.json: the difference of policy 0 in nats per token; null if its sampling was truncated."""

FORMAT = "sampler_format"
"""Key of checks.json: number format of the engine that sampled policy 0, if it differs from the policy's."""
FEWEST, MOST, SHARE = 4, 64, 32
"""Number of completions in a separate pass: one in `SHARE`, but at least `FEWEST` and at most `MOST`.

A round takes the time of at least four forward passes over its completions (one to sample them, three to train on
them), so from 128 completions on this pass takes at most 1/128 of a round. With a lag, the policy must be loaded as
well. Fewer completions would detect a wrong policy less reliably. In the demo in float32, a policy that is one round
too old (0.003 nats per token, completions of 32 tokens) is detected in a round with probability 0.13 by 4 completions,
0.15 by 16 and 0.94 by 64.
"""


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
    squares = float((absolute - mean * tokens).square().sum())
    error = math.sqrt(squares * count / (count - 1)) / total if count > 1 else math.inf
    return SamplerDifference(mean, error, int(total))


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
    """Raises if a policy did not sample these completions.

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
        f"{what} were not sampled from {policy}: the sampler's log-probs are {found.mean:.2g} nats a token from the "
        f"trainer's (over {found.tokens} tokens), and at most {allowed.nats:.2g} is explained ({allowed.explained}); "
        f"the likely cause: {_cause(policy)}; {remedy}"
    )


def require_evaluation(
    config: Config, policy: Policy, table: pa.Table, logps: list[list[float]], completions: Path, checks: Path
) -> SamplerDifference:
    """Raises if a policy did not sample these completions of an evaluation.

    Args:
        config: with the sections `model`, `evaluation` and `rollout`.
        policy: the policy.
        table: all or some of the completions.
        logps: the trainer's log-probs of them.
        completions: file of the completions.
        checks: checks.json of the run.

    Returns:
        The difference.

    Raises:
        UserError: the difference is larger than the allowed one.
    """
    found = of_lists(logps, table["sampling_logps"].to_pylist(), config.rollout.masked_by is not None)
    allowed = bound(policy, config.model.dtype, config.evaluation.temperature, checks)
    require(found, allowed, policy, f"the completions in {completions}", remedy(completions.parent))
    return found


def remedy(folder: Path) -> str:
    """Advice for samples from the wrong policy, which are in `folder`."""
    return f"delete {folder} and run again; to train anyway, set checks.accept: [{CHECK}]"


def _cause(policy: Policy) -> str:
    """The usual reason a sampler serves the wrong policy."""
    if policy.is_adapter:
        return "vLLM does not apply all modules of the adapter (update.lora.target_modules), or kept an older adapter"
    if policy.folder.name.isdigit() and int(policy.folder.name) > 0:
        return "an engine that stayed alive kept the weights of an older policy, or vLLM quantizes them"
    return "the folder's model has changed since the sampler read it, or vLLM quantizes its weights"


class RolloutProof:
    """Proves, before any weight changes, that the right policy sampled a round's rollouts.

    It uses trainer log-probs that the update computes anyway: those of the pass for π_old or, without one, those of the
    first optimizer step, between its backward pass and the change of weights. Three cases need a separate pass over
    1/32 of the completions (4 to 64): a lag, since the trainer then holds a later policy than the sampler did; dropout;
    and truncated or masked sampling, where the difference counts in one direction only. With `rollout.token_budget`, it
    looks at completions that the round's policy sampled entirely.
    """

    def __init__(self, config: Config, round_: int, policy: Policy, checks: Path, inputs: RoundFiles) -> None:
        """Reads the largest allowed difference.

        Args:
            config: the stage's configuration.
            round_: round number, from 1.
            policy: the policy that should have sampled.
            checks: checks.json of the run.
            inputs: the round's tables.
        """
        self.config, self.round, self.policy, self.prompts = config, round_, policy, inputs.prompts
        self.bound = bound(policy, config.sampler_format, config.rollout.temperature, checks)
        self.remedy = remedy(inputs.rollouts[0].parent)
        self.masked = config.rollout.masked_by is not None
        """True if the sampler's log-probs are of a distribution with masked tokens, so `by_pass` compares them."""
        self.is_done = False

    def by_pass(self, rollouts: pa.Table, engine: Engine | None = None) -> None:
        """Compares with a pass of the trainer without dropout, if the round's policy sampled any completion entirely.
        Without an engine, loads the policy that sampled, which the trainer does not hold.

        Raises:
            UserError: another policy sampled the rollouts.
        """
        if not any(self._own(rollouts)):
            return
        config, chosen = self.config, self._chosen(rollouts)
        sequences = round_data.sequences_of(chosen, self.prompts, self.policy)
        if engine is None:
            split_model.start_ranks()
            temperature = config.rollout.temperature
            logps = forward_only.logps_of_completions(config, self.policy, temperature, sequences, "proof")
        else:
            padded = engine.logps(sequences, dropout=False)
            logps = [row[:length].tolist() for row, length in zip(padded, sequences.sampled(), strict=True)]
        truncated = config.rollout.cut_by is not None or self.masked
        self._require(of_lists(logps, chosen["sampling_logps"].to_pylist(), truncated))

    def by_sums(self, absolute: Tensor, tokens: Tensor, rollouts: pa.Table) -> None:
        """Compares with log-probs that the update computes anyway.

        Args:
            absolute: Σ_t |log π_trainer − log π_sampler| of each completion.
            tokens: number of its sampled tokens, 0 if these log-probs do not include it.
            rollouts: the completions.

        Raises:
            UserError: another policy sampled the rollouts.
        """
        compared = (tokens > 0) & torch.tensor(self._own(rollouts))
        if compared.any():
            self._require(difference(absolute[compared], tokens[compared]))

    def _chosen(self, rollouts: pa.Table) -> pa.Table:
        """Picks completions, the same ones in every process."""
        rollouts = rollouts.filter(self._own(rollouts))
        order = permutation(len(rollouts), derive(self.config.seed, "proof", self.round))
        return rollouts.take(sorted(order[: min(max(FEWEST, len(rollouts) // SHARE), MOST)]))

    def _own(self, rollouts: pa.Table) -> list[bool]:
        """True for completions whose tokens were all sampled by the policy that samples the round."""
        if tables.SEGMENTS not in rollouts.column_names:
            return [True] * len(rollouts)
        number = self.config.rollout.policy_of(self.round)
        column = rollouts[tables.SEGMENTS].to_pylist()
        return [all(segment["policy_round"] == number for segment in segments) for segments in column]

    def _require(self, found: SamplerDifference) -> None:
        self.is_done = True
        require(found, self.bound, self.policy, f"the rollouts of round {self.round}", self.remedy)
