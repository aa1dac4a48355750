"""rollout: a policy and prompts → K completions a prompt with token ids and the sampler's log-probs (one shard of a
round).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline import kept, tables
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.generation import groups
from rloo_pipeline.generation.completions import Request
from rloo_pipeline.progress import say
from rloo_pipeline.prompt_set import PromptSet
from rloo_pipeline.seeds import cut, derive, rows_of_round

PARTS = 4
"""In which completions are handed on while others are sampled."""


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
    decoding = groups.decoding_of(settings)
    sampler = groups.load_sampler(policy_folder, config, train.longest, settings.max_completion_length)
    rows = _prompts(config, train, round_, shard)
    about = {
        "run": config.run,
        "round": round_,
        "shard": shard,
        "seed": config.seed,
        "policy": sampler.digest,
        **groups.facts(config.model, decoding),
    }
    samples, names = settings.num_generations, ("round", round_)
    made = []
    for part in groups.sample_parts(sampler, rows, samples, decoding, config.seed, names, PARTS):
        made.append(tables.make(part, tables.ROLLOUTS, "rollouts", **about))
        _announce(output, shard, made, len(rows) * samples)
    for first in kept.own_shards(settings.shards)[:1]:
        groups.expect(partial(_requests, config, train, round_ + 1, first), decoding)
    table = pa.concat_tables(made).combine_chunks()
    tables.save(output, table)
    tokens = pc.sum(pc.list_value_length(table["completion_ids"])).as_py()
    took = f"sampled in {sampler.seconds:.2f} s" + (", begun ahead of the stage" if sampler.ahead else "")
    speed = f"{tokens / sampler.seconds:.0f} tokens/s"
    say(f"round {round_} shard {shard}: {len(table)} completions, {tokens} tokens, {speed}, {took}")


def _announce(output: Path, shard: int, made: list[pa.Table], count: int) -> None:
    """Gives the last of these parts of a table, which will have so many rows, to those who score them."""
    end = sum(map(len, made))
    with tables.in_memory(made[-1]) as copy:
        what = {"rollouts": str(output), "rows": f"{end - len(made[-1])} to {end} of {count}"}
        kept.announce("clerk", what, shard, [copy.fileno()])


def _prompts(config: Config, train: PromptSet, round_: int, shard: int) -> list[dict[str, Any]]:
    """A shard's share of the prompts of a round."""
    settings = config.rollout
    places = rows_of_round(len(train), settings.sampled_prompts, round_, derive(config.seed, "prompts"))
    share = cut(len(places), settings.shards, shard)
    return train.rows(places[share.start : share.stop])


def _requests(config: Config, train: PromptSet, round_: int, shard: int) -> list[Request]:
    """What a shard will ask of the sampler."""
    rows = _prompts(config, train, round_, shard)
    return groups.requests_of(rows, config.rollout.num_generations, config.seed, ("round", round_))
