"""rollout: a policy and prompts → one shard of a round: K completions per prompt, with token ids and log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import groups
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.seeds import derive, rows_of_round, shard_range


def rollout(config: Config, prompts: Path, policy_folder: Path, round_: int, shard: int, output: Path) -> None:
    """Samples the completions of one shard.

    Args:
        config: of the stage.
        prompts: folder that the stage `prompts` wrote.
        policy_folder: the policy.
        round_: number of the round, from 1.
        shard: number of the shard, from 0.
        output: the table.

    Raises:
        UserError: there are fewer prompts than a round needs, the policy is not complete, or prompts and completions do
            not fit its context.
    """
    settings = config.rollout
    train = PromptSet(prompts / "train")
    if len(train) < settings.sampled_prompts:
        raise UserError(
            f"{prompts}: {len(train)} training prompts, a round needs {settings.sampled_prompts}; "
            "lower rollout.generation_batch_size"
        )
    sampling = groups.sampling_config_of(settings)
    sampler = groups.load_sampler(policy_folder, config, train.longest, settings.max_completion_length)
    rows = _prompts(config, train, round_, shard)
    about = {
        "run": config.run,
        "round": round_,
        "shard": shard,
        "seed": config.seed,
        "policy": sampler.digest,
        **groups.sampling_facts(config.model, sampling),
    }
    samples, names = settings.num_generations, ("round", round_)
    completions = groups.sample_groups(sampler, rows, samples, sampling, config.seed, names)
    table = tables.build(completions, tables.ROLLOUTS, "rollouts", **about)
    tables.save(output, table)
    tokens = pc.sum(pc.list_value_length(table["completion_ids"])).as_py()
    speed = f"{tokens / sampler.seconds:.0f} tokens/s"
    say(
        f"round {round_} shard {shard}: {len(table)} completions, {tokens} tokens, {speed}, "
        f"sampled in {sampler.seconds:.2f} s"
    )


def _prompts(config: Config, train: PromptSet, round_: int, shard: int) -> list[dict[str, Any]]:
    """The prompts of one shard of a round."""
    settings = config.rollout
    indices = rows_of_round(len(train), settings.sampled_prompts, round_, derive(config.seed, "prompts"))
    share = shard_range(len(indices), settings.shards, shard)
    return train.rows(indices[share.start : share.stop])
