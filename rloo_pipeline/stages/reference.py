"""reference: one shard of rollouts → log-probs of the completions under the reference policy (policy 0).

It is a job of its own, so that the trainer never holds a second model. It does not run where beta is 0.
"""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa

from rloo_pipeline.artifacts import round_tables, tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices, ranks, reproducible
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.training import forward_only, round_data
from rloo_pipeline.workers import engine_cache

SCHEMAS = {"reference": tables.REFERENCE, "teacher": tables.TEACHER}


def reference(config: Config, policy: Policy, rollouts: Path, output: Path, prompts: Path | None = None) -> None:
    """Writes reference log-probs of a shard, in the order of its rollouts; every rank of a split model calls this.

    Args:
        config: the stage's configuration.
        policy: the reference policy.
        rollouts: the shard, or the refill, which can be empty.
        output: the table.
        prompts: folder that the stage `prompts` wrote, for the images of a run that has any.
    """
    write_logps(config, "reference", policy, rollouts, output, prompts)


def write_logps(
    config: Config, kind: str, policy: Policy, rollouts: Path, output: Path, prompts: Path | None = None
) -> None:
    """Writes the log-probs of a shard under a model that does not change: the reference policy or a teacher.

    Args:
        config: the configuration of a run of this model.
        kind: `reference` or `teacher`; the table's kind, and its column with `_logps`.
        policy: the model.
        rollouts: as in `reference`.
        output: as in `reference`.
        prompts: as in `reference`.
    """
    digest = policy.digest  # before anything else reads its files
    table = round_tables.read_rollouts(rollouts, policy.vocabulary)
    logps, seconds = _logps(config, kind, policy, table, prompts) if len(table) else ([], 0.0)
    rows = [
        {"prompt_id": prompt_id, "sample": sample, f"{kind}_logps": values}
        for prompt_id, sample, values in zip(
            table["prompt_id"].to_pylist(), table["sample"].to_pylist(), logps, strict=True
        )
    ]
    about = {**tables.facts_about(table), "policy": digest, "dtype": config.model.dtype}
    if ranks.current().first:
        tables.write(output, rows, SCHEMAS[kind], kind, **about)
    count = sum(map(len, logps))
    say(f"{kind} log-probs of {len(rows)} completions, {count} tokens, computed in {seconds:.2f} s")


def _logps(
    config: Config, kind: str, policy: Policy, table: pa.Table, prompts: Path | None
) -> tuple[list[list[float]], float]:
    """Log-probs of the tokens that the model sampled in each row, and the seconds that they took."""

    from rloo_pipeline.training.logprobs import TokenLogProbs

    reproducible.use_torch(config.deepspeed.threads, config.reproducible)
    key = (policy.digest, config.model, config.rollout.temperature)
    logprobs = engine_cache.take(kind, key)
    if logprobs is None:
        model = forward_only.load_configured(policy, config)
        logprobs = TokenLogProbs(model, config.rollout.temperature)
        devices.hold_gpu(logprobs)
    logprobs.to(devices.device_type())  # a kept model may have left the GPU to another stage
    sequences = round_data.sequences_of(table, prompts, policy)
    began = time.monotonic()
    tokens = config.deepspeed.max_tokens_per_micro_batch
    logps = forward_only.score(logprobs, sequences, tokens, f"{kind} log-probs").logps
    seconds = time.monotonic() - began
    engine_cache.keep(kind, key, logprobs)
    return logps, seconds
