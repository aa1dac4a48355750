"""Partial rollouts (`rollout.token_budget`): a round cuts completions after N tokens; the next round continues them.

Each round begins as many prompts as without a budget, and continues the groups that the round before carried over (Kimi
k1.5, arXiv 2501.12599; slime also buffers whole groups). In a round, a completion grows by at most N tokens. A group is
whole when its K completions have ended; until then all of it is carried over. A cut depends on tokens alone, so a round
is a function of the configuration, independent of the number of shards and of timing.

A segment is the part of a completion that one policy sampled. A completion has at most S = ⌈max_completion_length / N⌉
segments, and the K of a group begin together, so no token is older than S − 1 rounds when its group trains.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import JSON, Config, Rollout
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout.requests import Begun, Request, SamplingConfig
from rloo_pipeline.seeds import derive, shard_range


class PartialGroups:
    """The completions of one shard of a round; implements `groups.Samples`."""

    def __init__(self, settings: Rollout, round_: int, rows: Sequence[JSON]) -> None:
        """Takes the rows of the shard, by (group, sample), with the tokens that earlier rounds have sampled."""
        self.settings, self.round, self.rows = settings, round_, rows
        self.tokens = sum(len(row["completion_ids"]) for row in rows)
        """Number of tokens that earlier rounds have sampled."""

    def prompts_of_requests(self) -> list[JSON]:
        """The rows that have not ended."""
        return [row for row in self.rows if row["finish_reason"] == tables.BUDGET]

    def requests(self) -> list[Request]:
        """A request for each row that has not ended. The first segment has the seed that it would have without a
        budget.
        """
        settings, requests = self.settings, []
        assert settings.token_budget is not None
        for row in self.prompts_of_requests():
            begun, number = Begun(row["completion_ids"], row["sampling_logps"]), len(row[tables.SEGMENTS])
            left = min(settings.token_budget, settings.max_completion_length - len(begun.ids))
            sampling = SamplingConfig.of_rollouts(settings)._replace(max_completion_length=left)
            seed = derive(row["seed"], "segment", number) if number else row["seed"]
            requests.append(Request(row["prompt_ids"], seed, sampling, begun=begun))
        return requests

    def table(self, columns: Sequence[JSON], schema: pa.Schema) -> pa.Table:  # noqa: ARG002
        """The table of the shard without a footer, in segments, given what was sampled for `requests`."""
        settings, samples = self.settings, self.settings.num_generations
        for row, sampled in zip(self.prompts_of_requests(), columns, strict=True):
            tokens = len(sampled["completion_ids"])
            segment = {"end": tokens, "policy_round": settings.policy_of(self.round)}
            row |= {**sampled, tables.SEGMENTS: [*row[tables.SEGMENTS], segment]}
            if sampled["finish_reason"] == "length" and tokens < settings.max_completion_length:
                row["finish_reason"] = tables.BUDGET
        for first in range(0, len(self.rows), samples):
            group = self.rows[first : first + samples]
            carried = any(row["finish_reason"] == tables.BUDGET for row in group)
            for row in group:
                row[tables.CARRIED] = carried
        return pa.Table.from_pylist(list(self.rows), schema=tables.IN_SEGMENTS)


def groups_of_shard(
    config: Config, train: PromptSet, begins: Sequence[int], round_: int, shard: int, before: Sequence[Path]
) -> PartialGroups:
    """The groups of one shard: its share of all groups that were carried over, followed by all that begin.

    Args:
        config: the stage's configuration.
        train: all training prompts.
        begins: indices of the prompts that the round begins.
        round_: number of the round, from 1.
        shard: number of the shard, from 0.
        before: all shards of the round before; none for the first round.

    Raises:
        UserError: a shard of the round before is missing, damaged or from a different round.
    """
    settings, samples = config.rollout, config.rollout.num_generations
    if len(before) != (settings.shards if round_ > 1 else 0):
        raise UserError(
            f"--before: {len(before)} tables, but rollout.token_budget needs all {settings.shards} rollouts of round "
            f"{round_ - 1}; name them"
        )
    expected = {"round": round_ - 1, "seed": config.seed}
    rows = [row for number, path in enumerate(before) for row in tables.read_carried(path, shard=number, **expected)]
    carried = len(rows) // samples
    share = shard_range(carried + len(begins), settings.shards, shard)
    begun = [
        {
            "prompt_id": prompt["prompt_id"],
            "sample": sample,
            "prompt_ids": prompt["prompt_ids"],
            "completion_ids": [],
            "sampling_logps": [],
            "finish_reason": tables.BUDGET,
            tables.SEGMENTS: [],
            "seed": derive(config.seed, "round", round_, prompt["prompt_id"], sample),
        }
        for prompt in train.rows(list(begins[max(0, share.start - carried) : max(0, share.stop - carried)]))
        for sample in range(samples)
    ]
    return PartialGroups(settings, round_, [*rows[share.start * samples : share.stop * samples], *begun])
