"""Proves before any weight changes that the right policy sampled a round's rollouts.

It uses trainer log-probs that the update computes anyway: those of the pass for π_old or, without one, those of the
first optimizer step, between its backward pass and the change of weights. Three cases need a separate pass over 1/32
of the completions (4 to 64): a lag, since the trainer then holds a later policy than the sampler did; dropout; and
truncated or masked sampling, which is judged by one side of the difference only. With `rollout.token_budget` it looks
at completions that the round's policy sampled as a whole.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from torch import Tensor

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.training import forward_only, round_data, sampler_proof
from rloo_pipeline.training.deepspeed_internals import split_loading
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.objective import Record
from rloo_pipeline.training.sampler_proof import SamplerDifference

FEWEST, MOST, SHARE = 4, 64, 32
"""Completions of a separate pass: one of `SHARE`, but at least `FEWEST` and at most `MOST`.

A round takes the time of at least four forward passes over its completions (one to sample them, three to train on
them), so from 128 completions on this pass takes at most 1/128 of a round. With a lag, loading the policy comes on top.
Few completions find a wrong policy less surely. In the demo in float32, a policy that is one round too old (0.003 nats
per token, completions of 32 tokens) is found in a round with a probability of 0.13 by 4, 0.15 by 16 and 0.94 by 64.
"""


class RolloutProof:
    """The proof for one round."""

    def __init__(self, config: Config, round_: int, policy: Policy, checks: Path, rollouts: Sequence[Path]) -> None:
        """Reads the largest allowed difference.

        Args:
            config: the stage's configuration.
            round_: round number, from 1.
            policy: the policy that should have sampled.
            checks: checks.json of the run.
            rollouts: the round's tables of rollouts.
        """
        self.config, self.round, self.policy = config, round_, policy
        self.bound = sampler_proof.bound(policy, config.sampler_format, config.rollout.temperature, checks)
        self.remedy = sampler_proof.remedy(rollouts[0].parent)
        self.masked = config.rollout.masked_by is not None
        """True if the sampler's log-probs are of a distribution with masked tokens, so `by_pass` compares them."""
        self.is_done = False

    def by_older_policy(self, rollouts: pa.Table, prompts: Path | None) -> None:
        """With a lag: loads the policy that sampled, which the trainer no longer holds, and compares with it.

        Raises:
            UserError: another policy sampled the rollouts.
        """
        config = self.config
        split_loading.start_ranks()
        chosen = self._chosen(rollouts)
        sequences = round_data.sequences_of(chosen, prompts, self.policy)
        logprobs = forward_only.load_configured(
            self.policy, config.model.dtype, config.deepspeed, config.rollout.temperature
        )
        devices.hold_gpu(logprobs)
        logps = forward_only.score(logprobs, sequences, config.deepspeed.micro_batch_tokens, "proof").logps
        logprobs.leave_gpu()
        del logprobs
        gc.collect()  # a model is in a reference cycle and would stay in memory with the trainer's
        self._require_lists(chosen, logps)

    def by_pass(self, engine: Engine, rollouts: pa.Table, prompts: Path | None) -> None:
        """Compares with a pass of the trainer without dropout.

        Raises:
            UserError: another policy sampled the rollouts.
        """
        chosen = self._chosen(rollouts)
        sequences = round_data.sequences_of(chosen, prompts, engine.policy)
        tokens = self.config.deepspeed.micro_batch_tokens
        logps = engine.logps(sequences, tokens, lambda _: None, dropout=False)
        lengths = sequences.sampled()
        self._require_lists(chosen, [row[:length].tolist() for row, length in zip(logps, lengths, strict=True)])

    def by_logps(self, old: Tensor, sampling: Tensor, mask: Tensor, rollouts: pa.Table) -> None:
        """Compares with the pass for π_old; all tensors are [completions, tokens].

        Raises:
            UserError: another policy sampled the rollouts.
        """
        absolute = ((old - sampling).double().abs() * mask).sum(-1)
        own = self._own(rollouts)
        if any(own):
            self._require(sampler_proof.difference(absolute[own], mask.sum(-1)[own]))

    def by_first_step(self, engine: Engine, record: Record, lengths: Tensor, rollouts: pa.Table) -> None:
        """Compares with the log-probs of the first optimizer step, just after its backward pass.

        Raises:
            UserError: another policy sampled the rollouts.
        """
        compared = (engine.sum_over_ranks(record.has_gap) > 0) & lengths.new_tensor(self._own(rollouts)).bool()
        absolute = engine.sum_over_ranks(record.gap[:, 0])
        if compared.any():
            self._require(sampler_proof.difference(absolute[compared], lengths[compared]))

    def _chosen(self, rollouts: pa.Table) -> pa.Table:
        """Picks completions, the same ones in every process."""
        rollouts = rollouts.filter(self._own(rollouts))
        order = permutation(len(rollouts), derive(self.config.seed, "proof", self.round))
        return rollouts.take(sorted(order[: min(max(FEWEST, len(rollouts) // SHARE), MOST)]))

    def _own(self, rollouts: pa.Table) -> list[bool]:
        """True for completions whose tokens are all of the policy that samples the round."""
        if tables.SEGMENTS not in rollouts.column_names:
            return [True] * len(rollouts)
        number = self.config.rollout.policy_of(self.round)
        column = rollouts[tables.SEGMENTS].to_pylist()
        return [all(segment["policy_round"] == number for segment in segments) for segments in column]

    def _require_lists(self, chosen: pa.Table, logps: list[list[float]]) -> None:
        if not len(chosen):
            return
        truncated = self.config.rollout.cut_by is not None or self.masked
        self._require(sampler_proof.of_lists(logps, chosen["sampling_logps"].to_pylist(), truncated))

    def _require(self, found: SamplerDifference) -> None:
        self.is_done = True
        what = f"the rollouts of round {self.round}"
        sampler_proof.require(found, self.bound, self.policy, what, self.remedy)
