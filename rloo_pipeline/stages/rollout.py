"""rollout: a policy and prompts → K completions a prompt with token ids and the sampler's log-probs (one shard of a
round).
"""

from __future__ import annotations

import time
from pathlib import Path

from rloo_pipeline import tables
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.generation import groups
from rloo_pipeline.progress import say
from rloo_pipeline.prompt_set import PromptSet
from rloo_pipeline.seeds import cut, derive, rows_of_round


def rollout(config: Config, prompts: Path, policy_folder: Path, round_: int, shard: int, output: Path) -> None:
    """Samples the completions of shard `shard` (from 0) of round `round_` (from 1).

    Raises:
        UserError: there are fewer prompts than a round needs, or the policy is not whole or does not fit its context.
    """
    settings = config.rollout
    train = PromptSet(prompts / "train")
    if len(train) < settings.sampled_prompts:
        raise UserError(
            f"{prompts}: {len(train)} training prompts, a round needs {settings.sampled_prompts}; "
            "lower rollout.generation_batch_size"
        )
    places = rows_of_round(len(train), settings.sampled_prompts, round_, derive(config.seed, "prompts"))
    share = cut(len(places), settings.shards, shard)
    rows = train.rows(places[share.start : share.stop])
    decoding = groups.decoding_of(settings)
    sampler = groups.load_sampler(policy_folder, config, train.longest, settings.max_completion_length)
    started = time.monotonic()
    made = groups.sample_groups(sampler, rows, settings.num_generations, decoding, config.seed, ("round", round_))
    seconds = time.monotonic() - started
    about = groups.facts(config.model, decoding)
    tables.write(
        output,
        made,
        tables.ROLLOUTS,
        "rollouts",
        run=config.run,
        round=round_,
        shard=shard,
        seed=config.seed,
        policy=sampler.digest,
        **about,
    )
    tokens = sum(len(row["completion_ids"]) for row in made)
    said = f"{len(made)} completions, {tokens} tokens, {tokens / seconds:.0f} tokens/s, sampled in {seconds:.2f} s"
    say(f"round {round_} shard {shard}: {said}")
