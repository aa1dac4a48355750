"""distance: how far a policy went from policy 0, on its own held-out completions → distance.json.

KL(π‖π₀) of a completion is estimated by Σ_t (log π − log π₀) over the tokens that π sampled: unbiased, with both
log-probs at the temperature of the sampling. Of greedy completions it is the log-ratio of what was said, at temperature
1, and no KL. Both log-probs are the trainer's, so that no difference of engines is in them.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np

from rloo_pipeline.artifacts import policy, tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config import Config
from rloo_pipeline.evaluation.statistics import estimate_mean
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.seeds import derive
from rloo_pipeline.training import forward_only
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences


def distance(config: Config, completions: Path, policy_folder: Path, reference: Path, output: Path) -> None:
    """Writes the mean KL a completion with its interval over prompts, and that a token."""
    import torch

    torch.set_num_threads(config.deepspeed.threads)
    table = tables.read(completions, "completions", ["prompt_ids", "completion_ids"])
    settings = config.evaluation
    temperature = settings.temperature or 1.0
    said = table["completion_ids"].to_pylist()
    sequences = Sequences(table["prompt_ids"].to_pylist(), said)

    def sums(folder: Path, what: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        model = forward_only.load(folder, config.model.dtype, config.model.trust_remote_code)
        tokens = config.deepspeed.max_tokens_per_micro_batch
        return np.array(
            [sum(row) for row in forward_only.score(TokenLogProbs(model, temperature), sequences, tokens, what).logps]
        )

    kl = sums(policy_folder, "policy")
    gc.collect()  # a model and its projection name each other; without this both models would be there at once
    kl -= sums(reference, "policy 0")
    of_prompt = kl.reshape(-1, settings.num_generations).mean(axis=1)
    found = estimate_mean(of_prompt, settings.bootstrap_samples, derive(config.seed, "bootstrap"))
    made = {
        "policy": policy.digest(policy_folder),
        "reference": policy.digest(reference),
        "temperature": settings.temperature,
        "kl/sequence_mean": found.value,
        "ci95": found.ci95,
        "kl": float(kl.sum() / sum(map(len, said))),
    }
    write_json(output, made)
    around = " (95% interval {:.3g} to {:.3g})".format(*found.ci95) if found.ci95 else ""
    say(f"KL from policy 0: {found.value:.3g} nats a completion{around}")
