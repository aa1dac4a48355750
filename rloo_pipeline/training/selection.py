"""Selects the completions that an update uses, and the groups that teach, so that `refill` and `update` agree.

A group teaches if some completion in the loss has a score that differs from the mean in its baseline. If
`reward_clip_range` clips the scores themselves (not standardized rewards), clipped scores are compared.
"""

from typing import NamedTuple

import pyarrow as pa
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from rloo_pipeline.algorithm import nan_stats
from rloo_pipeline.algorithm.shaping import exclude, normalized_sum
from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.round_tables import RoundTables
from rloo_pipeline.config import Algorithm, Config
from rloo_pipeline.errors import UserError


class ScoresByFunction(NamedTuple):
    """The scores of a round's completions, one column per reward function."""

    values: Float64[Tensor, "completions functions"]
    """Scores; NaN where a function does not apply."""
    weights: Float64[Tensor, " functions"]

    def normalized_sums(self, excluded: Bool[Tensor, " completions"], samples: int) -> Float64[Tensor, " completions"]:
        """`normalized_sum` over groups of `samples`, NaN where excluded."""
        values = torch.where(excluded.unsqueeze(-1), torch.nan, self.values)
        return normalized_sum(values.view(-1, samples, len(self.weights)), self.weights).flatten()


class Selection(NamedTuple):
    """The completions of a round that the update uses."""

    masked: Bool[Tensor, " completions"]
    """True for completions that are left out of the loss."""
    excluded: Bool[Tensor, " completions"]
    """True for completions that are neither in the baseline nor in the denominator of the loss."""
    teaching: Bool[Tensor, " prompts"]
    """True for groups with a non-zero advantage on a completion in the loss."""


def select(
    algorithm: Algorithm, samples: int, scores: Float64[Tensor, " completions"], truncated: Bool[Tensor, " completions"]
) -> Selection:
    """Decides which completions are masked or excluded, and which groups teach.

    Selecting groups of a round, refills and `filter_zero_variance` all use this function.

    Args:
        algorithm: the section `algorithm`.
        samples: K.
        scores: NaN where unscorable.
        truncated: True if the completion has no end token.
    """
    masked = truncated & algorithm.mask_truncated_completions
    excluded = masked & (not algorithm.keep_truncated_in_baseline)
    if algorithm.reward_clip_range is not None and algorithm.reward_normalization == "none":
        scores = scores.clamp(*algorithm.reward_clip_range)
    teaching = nan_stats.teaching(exclude(scores, excluded).view(-1, samples), ~masked.view(-1, samples))
    if algorithm.filter_zero_variance:
        filtered = ~teaching.repeat_interleave(samples)
        masked, excluded = masked | filtered, excluded | filtered
    return Selection(masked, excluded, teaching)


def teaching_groups(algorithm: Algorithm, samples: int, sampled: RoundTables) -> Bool[Tensor, " prompts"]:
    """True for groups of K = `samples` in these tables that teach, in their order."""
    return select(algorithm, samples, scores(sampled.scores), truncated(sampled.rollouts)).teaching


def chosen_rows(config: Config, sampled: RoundTables) -> list[int]:
    """Rows that the update trains on: all of them, or the first teaching groups if a round has more than it needs."""
    samples = config.rollout.num_generations
    if config.rollout.token_budget or len(sampled.rollouts) == config.rollout.generation_batch_size:
        return list(range(len(sampled.rollouts)))
    groups = nan_stats.first_teaching(teaching_groups(config.algorithm, samples, sampled), config.rollout.num_prompts)
    return [group * samples + sample for group in groups for sample in range(samples)]


def truncated(rollouts: pa.Table) -> Bool[Tensor, " completions"]:
    """True where the completion has no end token."""
    return torch.tensor([reason != "stop" for reason in rollouts["finish_reason"].to_pylist()], dtype=torch.bool)


def scores(table: pa.Table) -> Float64[Tensor, " completions"]:
    """Weighted rewards; NaN where unscorable."""
    return torch.tensor(table["reward"].to_numpy())


def scores_of_functions(table: pa.Table) -> ScoresByFunction:
    """The scores of each reward function, and the weights in the table's footer.

    Raises:
        UserError: the footer has no weights.
    """
    weights = tables.weights_of(table)
    if not weights:
        raise UserError("scores: the tables lack the weights of the reward functions; delete them and run again")
    columns = [torch.tensor(table[tables.score_column(name)].to_numpy()) for name in weights]
    return ScoresByFunction(torch.stack(columns, -1), torch.tensor(list(weights.values()), dtype=torch.float64))
