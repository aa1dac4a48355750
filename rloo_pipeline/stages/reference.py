"""reference: one shard of rollouts → log-probs of the completions under the reference policy (policy 0).

It is a separate job, so that the trainer never holds a second model. It does not run if beta is 0.
"""

import gc
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from rloo_pipeline.artifacts import round_tables, tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices, ranks
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.training import forward_only, round_data
from rloo_pipeline.training.forward_only import TokenValues
from rloo_pipeline.workers import engine_cache


def reference(config: Config, policy: Policy, rollouts: Path, output: Path, prompts: Path | None = None) -> None:
    """Writes reference log-probs of a shard, in the order of its rollouts; every rank of a split model calls this.

    Args:
        config: the stage's configuration.
        policy: the reference policy.
        rollouts: table of the shard's rollouts, or of the refill's, which can be empty.
        output: the table of log-probs.
        prompts: folder that the stage `prompts` wrote; only needed if prompts have images.
    """
    write_logps("reference", [Scorer(config, policy)], rollouts, output, prompts)


class Scorer(NamedTuple):
    """A model that never changes, and the rows that it scores."""

    config: Config
    """The configuration of a run that uses this model."""
    policy: Policy
    """The model."""
    rows: Sequence[int] | None = None
    """Rows of the shard to score; None for all, with a model that a worker keeps."""


def write_logps(
    kind: str, scorers: Sequence[Scorer], rollouts: Path, output: Path, prompts: Path | None = None, top_k: int = 0
) -> None:
    """Writes the log-probs of a shard under models that never change: the reference policy or teachers.

    Args:
        kind: `reference` or `teacher`: the kind of the table, whose column is this name with `_logps`.
        scorers: models that share the rows of the shard.
        rollouts: as in `reference`.
        output: as in `reference`.
        prompts: as in `reference`.
        top_k: number of likeliest tokens of a teacher to write for each position.
    """
    digests = [scorer.policy.digest for scorer in scorers]  # before anything else reads their files
    digest = digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()
    table = round_tables.read_rollouts(rollouts, min(scorer.policy.vocabulary for scorer in scorers))
    scored = TokenValues.empty(len(table))
    total = 0.0
    for scorer in scorers:
        chosen = range(len(table)) if scorer.rows is None else scorer.rows
        if chosen:
            values, seconds = _score(scorer, kind, table.take(list(chosen)), prompts, top_k)
            total += seconds
            for column, of_scorer in zip(scored, values, strict=True):
                for row, of_row in zip(chosen, of_scorer, strict=True):
                    column[row] = of_row
    columns = {f"{kind}_logps": scored.logps}
    schema = {"reference": tables.REFERENCE, "teacher": tables.TEACHER}[kind]
    if top_k:
        columns |= {tables.TOP_IDS: scored.top_ids, tables.TOP_LOGPS: scored.top_logps}
        schema = tables.WITH_TOP
    rows = table.select(["prompt_id", "sample"]).to_pydict() | columns
    about = {**tables.facts_about(table), "policy": digest, "dtype": scorers[0].config.model.dtype}
    if ranks.current().first:
        tables.write(output, pa.table(rows, schema=schema), schema, kind, **about)
    count = sum(map(len, scored.logps))
    say(f"{kind} log-probs of {len(table)} completions, {count} tokens, computed in {total:.2f} s")


def _score(scorer: Scorer, kind: str, table: pa.Table, prompts: Path | None, top_k: int) -> tuple[TokenValues, float]:
    """Values of the sampled tokens in each row, and the seconds that computing them took."""
    config, policy = scorer.config, scorer.policy
    key = (policy.digest, config.model, config.rollout.temperature, config.deepspeed.sequence_parallel)
    logprobs = engine_cache.take(kind, key) if scorer.rows is None else None
    if logprobs is None:
        logprobs = forward_only.load_configured(config, policy, config.rollout.temperature)
        devices.hold_gpu(logprobs)
    logprobs.enter_gpu()  # a kept model may have left it to another stage
    sequences = round_data.sequences_of(table, prompts, policy)
    began = time.monotonic()
    tokens = config.deepspeed.micro_batch_tokens
    values = forward_only.score(logprobs, sequences, tokens, f"{kind} log-probs", top_k=top_k)
    seconds = time.monotonic() - began
    if scorer.rows is None:
        engine_cache.keep(kind, key, logprobs)
    else:
        logprobs.discard()
        del logprobs
        gc.collect()  # a reference cycle would keep this model in memory beside the next one
    return values, seconds
