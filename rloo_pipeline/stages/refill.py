"""refill: the scores of a round → further completions with their scores, if too few of its groups teach.

This is DAPO's dynamic sampling (Yu et al. 2025, arXiv 2503.14476, section 3.2) with a limit. One job samples and
scores, up to `rollout.refill` times. What it samples depends on the round's scores alone, not on shards or timing.
If enough groups teach, it starts no engine, and its tables are empty.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.artifacts.round_tables import RoundFiles, RoundTables
from rloo_pipeline.config import Config, Rollout
from rloo_pipeline.data.prompts_of_round import prompts_of_round
from rloo_pipeline.rollout import groups
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.training.selection import teaching_groups
from rloo_pipeline.user_code.score_table import score_tables, scoring_facts
from rloo_pipeline.workers import kept_models


def refill(
    config: Config,
    prompts: Path,
    policy: Policy,
    round_: int,
    rollouts: Sequence[Path],
    scores: Sequence[Path],
    output: Path,
    output_scores: Path,
    difficulty: Sequence[Path] = (),
    pass_rates: Path | None = None,
) -> None:
    """Samples until as many groups teach as the update trains on, prompts run out, or the limit is reached.

    Args:
        config: the stage's configuration.
        prompts: folder that the stage `prompts` wrote.
        policy: the policy that sampled the shards.
        round_: number of the round, from 1.
        rollouts: all shards of the round's rollouts, in order.
        scores: all shards of its scores, in order.
        output: the table of rollouts.
        output_scores: the table of their scores.
        difficulty: all tables that `difficulty` wrote, in order.
        pass_rates: table that `pass-rates` wrote for the round that made the policy.

    Raises:
        UserError: the tables do not belong to this round and policy, or a reward function fails.
    """
    settings = config.rollout
    algorithm, samples = config.algorithm, settings.num_generations
    sampled = RoundFiles(rollouts, scores).read(round=round_, policy=policy.digest)
    teaching = teaching_groups(algorithm, samples, sampled).tolist()
    train = PromptSet(prompts / "train")
    spare = prompts_of_round(config, train, round_, difficulty, pass_rates).spare
    parts, seconds, sampler = list[RoundTables](), 0.0, None
    while len(parts) < settings.refill and spare and (count := prompts_needed(settings, teaching)):
        rows, spare = spare[:count], spare[count:]
        sampler = sampler or groups.load_sampler(policy, config, train, settings.max_completion_length)
        wanted = groups.WholeGroups.of_rollouts(config, train.rows(rows), "round", round_)
        completions = groups.sample_groups(sampler, config, wanted)
        scored = score_tables(config.rewards, config.scoring, completions, train, policy, kept_models.elsewhere(config))
        parts.append(RoundTables(*completions, *scored))
        teaching += teaching_groups(algorithm, samples, parts[-1]).tolist()
        seconds += sampler.seconds
    _write(config, round_, policy.digest, parts, output, output_scores)
    say(
        f"round {round_}: {sum(teaching)} of {len(teaching)} groups teach, {settings.num_prompts} are needed; "
        f"{len(parts)} of at most {settings.refill} refills, sampled in {seconds:.2f} s"
    )


def prompts_needed(settings: Rollout, teaching: Sequence[bool]) -> int:
    """Number of prompts to sample: enough for the missing groups, at the share of groups that have taught so far."""
    most, taught = settings.sampled_prompts, sum(teaching)
    missing = max(0, settings.num_prompts - taught)
    return min(most, -(-missing * len(teaching) // taught)) if taught else most


def _write(
    config: Config, round_: int, digest: str, parts: Sequence[RoundTables], rollouts: Path, scores: Path
) -> None:
    """Writes the tables as one more shard."""
    schema = groups.schema(config)
    rollout_table = pa.concat_tables([schema.empty_table(), *(part.rollouts for part in parts)])
    about = groups.rollout_facts(config, round_, config.rollout.shards, digest)
    tables.write(rollouts, rollout_table, schema, "rollouts", **about, refills=len(parts))
    about = {**tables.facts_about(tables.read(rollouts, "rollouts")), "policy": digest}
    schema = tables.scores_schema([reward.column for reward in config.rewards])
    scored = pa.concat_tables([schema.empty_table(), *(part.scores for part in parts)])
    tables.write(scores, scored, schema, "scores", **about, **scoring_facts(config.rewards))
