"""difficulty: policy 0 and the training prompts → for each prompt, how many of K completions are scored, and right.

One shard of the prompts per job. The name of the run is not in the table, so that runs can share it.
"""

from math import nan
from pathlib import Path
from statistics import fmean

import pyarrow as pa

from rloo_pipeline.artifacts import prompt_counts, tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.data.prompts_of_round import require_enough
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging.completions import counts_of
from rloo_pipeline.rollout import groups
from rloo_pipeline.rollout.requests import SamplingConfig
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.seeds import shard_range
from rloo_pipeline.user_code.score_table import score_tables
from rloo_pipeline.workers import kept_models

TOGETHER = 16_384
"""Completions that are sampled at a time. Until they are in a table, each token takes about 100 bytes; an engine idles
only at the end of each piece.
"""


def difficulty(config: Config, prompts: Path, policy: Policy, shard: int, output: Path) -> None:
    """Samples and scores completions of one shard of the training prompts.

    Args:
        config: the stage's configuration.
        prompts: folder that the stage `prompts` wrote.
        policy: policy 0.
        shard: number of the shard, from 0, of `rollout.shards`.
        output: the table of pass rates.

    Raises:
        UserError: the configuration selects no prompts, the policy is incomplete, or a reward function fails.
    """
    select = config.dataset.select
    if select is None:
        raise UserError("difficulty: the configuration has no dataset.select; set it, or leave this stage out")
    train = PromptSet(prompts / "train")
    require_enough(config.rollout, len(train), str(prompts))
    share = shard_range(len(train), config.rollout.shards, shard)
    sampler = groups.load_sampler(policy, config, train, config.rollout.max_completion_length)
    pieces, size = list[pa.Table](), -(-TOGETHER // select.num_generations)
    for first in range(0, len(share), size):
        rows = train.rows(list(share[first : first + size]))
        wanted = groups.WholeGroups.of_rollouts(config, rows, "difficulty", samples=select.num_generations)
        pieces += groups.sample_groups(sampler, config, wanted)
    completions = pa.concat_tables(pieces)
    [scores] = score_tables(
        [config.deciding_reward], config.scoring, [completions], train, policy, kept_models.elsewhere(config)
    )
    counts = counts_of(config, scores, select.num_generations)
    about = {"shard": shard, "num_generations": select.num_generations, "policy": sampler.digest}
    prompt_counts.write(
        output, counts, 0, **about, **groups.sampling_facts(config.model, SamplingConfig.of_rollouts(config.rollout))
    )
    tokens = sum(tables.sampled_lengths(completions))
    rates = [counted.pass_rate for counted in counts.values() if counted.samples]
    say(f"{len(share)} prompts, {tokens} tokens, pass rate {fmean(rates or [nan]):.1%} on average")
    if without := len(share) - len(rates):
        say(f"{without} prompts have no pass rate: '{config.correct.reward}' scored none of their completions")
