"""Chooses the training prompts of a round: all in epochs, shuffled or in order, some of them, or drawn by the policy's
uncertainty.

With `dataset.select.weights` a round draws its prompts without replacement, with weights of E[p(1 − p)], the expected
variance of a reward of 0 or 1 (Foster et al. 2025, arXiv 2502.12272, draw by p(1 − p)). The chance p that a completion
is right has the distribution Beta(1 + right, 1 + wrong), as in MoPPS (Qu et al. 2025, arXiv 2507.04632), so a prompt
that was never sampled has the weight 1/6, and none has the weight 0. Counts of earlier rounds lose half of their weight
each time a prompt is sampled again, since the policy has changed.

The prompts of a round may only depend on what the policy that samples it was made from: with `rollout.lag`, on the
scores of the rounds up to that policy's. So a round gets the same prompts whatever else has finished by then.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isnan, log
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rloo_pipeline.artifacts import prompt_counts, tables
from rloo_pipeline.artifacts.prompt_counts import Counts
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config, Rollout
from rloo_pipeline.errors import UserError
from rloo_pipeline.seeds import derive, earlier_rounds, rows_for_refill, rows_of_round

KEPT = 0.5
"""Factor on the earlier counts of a prompt each time it is sampled again."""


class RoundPrompts(NamedTuple):
    """Rows of the training prompts that a round may use."""

    sampled: list[int]
    """Prompts that the round always samples."""
    spare: list[int]
    """All other prompts that may be trained on, in the order in which refills take them."""


def prompts_of_round(
    config: Config, train: PromptSet, round_: int, difficulty: Sequence[Path] = (), latest: Path | None = None
) -> RoundPrompts:
    """The training prompts of a round.

    Args:
        config: configuration of the stage `rollout`.
        train: all training prompts.
        round_: number of the round, from 1.
        difficulty: all tables of the stage `difficulty`, if `dataset.select` needs pass rates.
        latest: pass rates of the round that made the sampling policy; None for policy 0.

    Raises:
        UserError: there are fewer prompts than a round needs, or a table is missing, damaged, or from a different
            round.
    """
    count, select = config.rollout.sampled_prompts, config.dataset.select
    require_enough(config.rollout, len(train), str(train.folder.parent))
    ids: list[str] = train.table["prompt_id"].to_pylist()
    first = _of_policy_0(config.rollout, ids, difficulty) if config.measures_difficulty else {}
    rows = list(range(len(ids)))
    if select is not None and select.pass_rate is not None:
        rows = kept_rows([first[prompt_id] for prompt_id in ids], select.pass_rate)
        if len(rows) < count:
            rates = [first[prompt_id].pass_rate for prompt_id in ids]
            raise UserError(_too_few(select.pass_rate, rates, len(rows), count))
    if not config.dataset.shuffle_dataset:
        start = (round_ - 1) * count % len(rows)
        in_order = rows[start:] + rows[:start]
        return RoundPrompts(in_order[:count], in_order[count:])
    seed = derive(config.seed, "prompts")
    if select is None or select.weights == "none":
        indices = rows_of_round(len(rows), count, round_, seed)
        spare = rows_for_refill(len(rows), indices, round_, seed)
        return RoundPrompts([rows[index] for index in indices], [rows[index] for index in spare])
    counts = _latest(config.rollout, round_, latest, first) if config.updates_pass_rates else first
    weights = {ids[row]: uncertainty(counts.get(ids[row], Counts())) for row in rows}
    row_of = dict(zip(ids, range(len(ids)), strict=True))
    drawn = [row_of[prompt_id] for prompt_id in draw(weights, len(weights), derive(seed, round_))]
    return RoundPrompts(drawn[:count], drawn[count:])


def require_enough(rollout: Rollout, count: int, place: str) -> None:
    """Checks that there are at least as many training prompts as a round samples.

    Args:
        rollout: the section of the configuration.
        count: number of training prompts.
        place: file or folder of the prompts, for the message.

    Raises:
        UserError: there are fewer prompts than that.
    """
    if count < rollout.sampled_prompts:
        raise UserError(
            f"{place}: {count} training prompts, but a round needs {rollout.sampled_prompts}; lower "
            "rollout.generation_batch_size, or add prompts that differ"
        )


def kept_rows(counts: Sequence[Counts], pass_rate: tuple[float, float]) -> list[int]:
    """Rows whose pass rate lies in a range, ends included; rows without a pass rate are left out."""
    low, high = pass_rate
    return [row for row, counted in enumerate(counts) if low <= counted.pass_rate <= high]


def uncertainty(counts: Counts) -> float:
    """E[p(1 − p)] for p ~ Beta(1 + right, 1 + wrong), which is ab / ((a + b)(a + b + 1))."""
    a, b = 1 + counts.right, 1 + counts.samples - counts.right
    return a * b / ((a + b) * (a + b + 1))


def draw(weights: Mapping[str, float], count: int, seed: int) -> list[str]:
    """Draws prompts one by one without replacement, with probabilities proportional to their weights.

    Each prompt gets the key log(u)/w with a uniform u of its own, and the prompts with the largest keys are drawn
    (Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir"). So the result does not depend on the
    order of the prompts, and two prompts keep their order if others are added or removed.

    Args:
        weights: positive weights by prompt_id.
        count: number of prompts to draw, at most all of them.
        seed: seed of the random numbers.

    Returns:
        The prompt_ids in the order in which they were drawn.
    """
    keys = {name: log((derive(seed, name) + 1) / (2**63 + 1)) / weight for name, weight in weights.items()}
    return sorted(keys, key=lambda name: (-keys[name], name))[:count]


def after_round(before: Mapping[str, Counts], sampled: Mapping[str, Counts]) -> dict[str, Counts]:
    """The counts after a round, by prompt_id.

    Args:
        before: the counts before it.
        sampled: completions of the round.
    """
    counts = dict(before)
    for prompt_id, new in sampled.items():
        old = before.get(prompt_id, Counts())
        counts[prompt_id] = Counts(KEPT * old.right + new.right, KEPT * old.samples + new.samples)
    return dict(sorted(counts.items()))


def _of_policy_0(rollout: Rollout, ids: Sequence[str], files: Sequence[Path]) -> dict[str, Counts]:
    """The counts of policy 0 for all training prompts."""
    if len(files) != rollout.shards:
        raise UserError(
            f"--difficulty: {len(files)} tables, but dataset.select needs all {rollout.shards} "
            "(rollout.shards); name those that the stage difficulty wrote"
        )
    counts = prompt_counts.read(files, 0)
    missing = next((prompt_id for prompt_id in ids if prompt_id not in counts), None)
    if missing is not None:
        raise UserError(f"{files[0].parent}: no pass rate of the training prompt {missing}; delete it and run again")
    if not any(counts[prompt_id].samples for prompt_id in ids):
        raise UserError(
            f"{files[0].parent}: no prompt has a pass rate, because the reward in correct.reward scored no completion; "
            "name another one there, or leave dataset.select out"
        )
    return counts


def _latest(rollout: Rollout, round_: int, file: Path | None, difficulty: Mapping[str, Counts]) -> Mapping[str, Counts]:
    """The counts from rounds that the sampling policy was trained on."""
    policy_round = rollout.policy_of(round_)
    if policy_round == 0:
        return difficulty
    if file is None:
        raise UserError(
            f"--pass-rates: dataset.select.weights: online needs the table of round {policy_round}; name it"
        )
    return prompt_counts.read([file], policy_round)


def _too_few(pass_rate: tuple[float, float], rates: Sequence[float], count: int, needed: int) -> str:
    """The error message for a range of pass rates that leaves too few prompts."""
    low, high = pass_rate
    below, above, none = sum(rate < low for rate in rates), sum(rate > high for rate in rates), sum(map(isnan, rates))
    return (
        f"dataset.select.pass_rate: {count} of {len(rates)} training prompts have a pass rate of policy 0 from {low:g} "
        f"to {high:g} ({below} are below, {above} above, {none} have none), but a round needs "
        f"{needed}; widen the range, or lower rollout.generation_batch_size"
    )


def expected_lengths(
    config: Config, train: PromptSet, rows: Sequence[int], round_: int, rounds: Path
) -> dict[str, float]:
    """Mean tokens of each prompt's completions when it was last sampled, by prompt_id; unsampled prompts are left out.

    Only rounds that the sampling policy was trained on count, since others may be in flight. With `dataset.select`
    or without `dataset.shuffle_dataset` nothing is known, since rounds are not those of shuffled epochs.

    Args:
        config: configuration of the stage `rollout`.
        train: all training prompts.
        rows: rows of the prompts.
        round_: number of the round that samples, from 1.
        rounds: folder of the rounds.
    """
    if config.dataset.select is not None or not config.dataset.shuffle_dataset:
        return {}
    last, seed = config.rollout.policy_of(round_), derive(config.seed, "prompts")
    sampled = earlier_rounds(rows, len(train), config.rollout.sampled_prompts, last, seed)
    ids: list[str] = train.table["prompt_id"].to_pylist()
    by_round = defaultdict[int, set[str]](set)
    for row, number in sampled.items():
        by_round[number].add(ids[row])
    lengths = defaultdict[str, list[int]](list)
    for number, wanted in by_round.items():
        for file in sorted((rounds / f"{number:05d}" / "rollouts").glob("*.parquet")):
            table = tables.read(file, "rollouts", ["prompt_id", "completion_ids"])
            counts = zip(table["prompt_id"].to_pylist(), tables.lengths(table["completion_ids"]), strict=True)
            for prompt_id, count in counts:
                if prompt_id in wanted:
                    lengths[prompt_id].append(count)
    return {prompt_id: fmean(counts) for prompt_id, counts in lengths.items()}
