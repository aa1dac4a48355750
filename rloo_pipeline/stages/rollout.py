"""rollout: a policy and prompts → one shard of a round: K completions per prompt, with token ids and log-probs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet, held_out_part, tool_names
from rloo_pipeline.config import Config
from rloo_pipeline.data.prompts_of_round import expected_lengths, prompts_of_round
from rloo_pipeline.rollout import groups, partial
from rloo_pipeline.rollout.groups import WholeGroups
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.seeds import shard_range


def rollout(
    config: Config,
    prompts: Path,
    policy: Policy,
    round_: int,
    shard: int,
    output: Path,
    held_out: Path | None,
    difficulty: Sequence[Path] = (),
    pass_rates: Path | None = None,
    before: Sequence[Path] = (),
) -> None:
    """Samples the completions of one shard, and its share of the held-out completions of the round.

    Args:
        config: the stage's configuration.
        prompts: folder that the stage `prompts` wrote.
        policy: the policy.
        round_: number of the round, from 1.
        shard: number of the shard, from 0.
        output: the table of rollouts.
        held_out: table for some held-out completions of the same policy; without it, none are sampled.
        difficulty: all tables that `difficulty` wrote, in order, if `dataset.select` needs pass rates.
        pass_rates: table that `pass-rates` wrote for the round that made the policy, if prompts are drawn by later pass
            rates.
        before: all shards of the round before, with `rollout.token_budget`.

    Raises:
        UserError: there are fewer prompts than a round needs, a table of pass rates or of the round before is missing,
            damaged or from a different round, the policy is incomplete, or prompts and completions do not fit its
            context.
    """
    settings = config.rollout
    train = PromptSet(prompts / "train")
    indices = prompts_of_round(config, train, round_, difficulty, pass_rates).sampled
    if settings.token_budget is None:
        share = shard_range(len(indices), settings.shards, shard)
        own, begun = indices[share.start : share.stop], 0
        whole = WholeGroups.of_rollouts(config, train.rows(own), "round", round_)
        if config.vllm.data_parallel_size > 1:  # only the speed depends on it
            whole = whole._replace(expected=expected_lengths(config, train, own, round_, output.parents[2]))
        wanted: groups.Samples = whole
    else:
        wanted = partial.groups_of_shard(config, train, indices, round_, shard, before)
        begun = wanted.tokens
    longest = settings.max_completion_length
    sampler = groups.load_sampler(policy, config, train, longest)
    about = groups.rollout_facts(config, round_, shard, sampler.digest, tool_names(prompts))
    held_out_rows = _held_out(config, prompts, train.longest, shard) if held_out else []
    held_out_wanted = WholeGroups.of_evaluations(config, held_out_rows, 1, config.evaluation.temperature, longest)
    completions, held_out_completions = groups.sample_groups(sampler, config, wanted, held_out_wanted)
    if held_out:
        held_out_about = about | groups.sampling_facts(config.model, held_out_wanted.sampling)
        tables.write(held_out, held_out_completions, held_out_completions.schema, "held_out", **held_out_about)
    tables.write(output, completions, completions.schema, "rollouts", **about)
    tokens = sum(tables.sampled_lengths(completions)) - begun
    speed = f"{tokens / sampler.seconds:.0f} tokens/s"
    say(
        f"round {round_} shard {shard}: {len(completions)} completions, {tokens} tokens, {speed}, "
        f"sampled in {sampler.seconds:.2f} s"
    )


def _held_out(config: Config, prompts: Path, longest: int, shard: int) -> list[dict[str, Any]]:
    """One shard's share of the held-out prompts of a round: the first ones, except those too long for the engine."""
    count = config.held_out_each_round
    if not count:
        return []
    table = PromptSet(held_out_part(prompts))
    rows = [row for row in table.rows(list(range(min(count, len(table))))) if len(row["prompt_ids"]) <= longest]
    share = shard_range(len(rows), config.rollout.shards, shard)
    return rows[share.start : share.stop]
