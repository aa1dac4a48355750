"""reference: one shard of rollouts → log-probs of the completions under the reference policy (policy 0).

It is a job of its own, so that the trainer never holds a second model. It does not run where beta is 0.
"""

from __future__ import annotations

import time
from pathlib import Path

from rloo_pipeline.artifacts import policy, tables
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.training import forward_only
from rloo_pipeline.workers import engine_cache


def reference(config: Config, policy_folder: Path, rollouts: Path, output: Path) -> None:
    """Writes the reference log-probs of one shard, in the order of its rollouts.

    Args:
        config: of the stage.
        policy_folder: the reference policy.
        rollouts: the shard.
        output: the table.
    """
    import torch

    from rloo_pipeline.training.logprobs import TokenLogProbs
    from rloo_pipeline.training.packing import Sequences

    torch.set_num_threads(config.deepspeed.threads)
    rolled = tables.read(rollouts, "rollouts")
    digest = policy.digest(policy_folder)
    key = (digest, config.model, config.rollout.temperature)
    logprobs = engine_cache.take("reference", key)
    if logprobs is None:
        model = forward_only.load(policy_folder, config.model.dtype, config.model.trust_remote_code)
        logprobs = TokenLogProbs(model, config.rollout.temperature)
        devices.hold_gpu(logprobs)
    logprobs.to(devices.device_type())  # a kept model may have left the GPU to another stage
    sequences = Sequences(rolled["prompt_ids"].to_pylist(), rolled["completion_ids"].to_pylist())
    tokens = config.deepspeed.max_tokens_per_micro_batch
    began = time.monotonic()
    logps = forward_only.score(logprobs, sequences, tokens, "reference log-probs").logps
    seconds = time.monotonic() - began
    rollout_facts = tables.footer(rolled)
    rows = [
        {"prompt_id": prompt_id, "sample": sample, "reference_logps": values}
        for prompt_id, sample, values in zip(
            rolled["prompt_id"].to_pylist(), rolled["sample"].to_pylist(), logps, strict=True
        )
    ]
    about = {
        **{key: rollout_facts[key] for key in ("run", "round", "shard", "seed")},
        "policy": digest,
        "dtype": config.model.dtype,
    }
    tables.write(output, rows, tables.REFERENCE, "reference", **about)
    engine_cache.keep("reference", key, logprobs)
    count = sum(map(len, sequences.completions))
    say(f"reference log-probs of {len(rows)} completions, {count} tokens, computed in {seconds:.2f} s")
