"""evaluate: a policy and the held-out prompts → completions with scores, and their summary with 95% intervals.

The seeds of the samples do not depend on the policy, so warm start and final policy are asked the same in the same way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline import tables
from rloo_pipeline.config import Config
from rloo_pipeline.files import write_json
from rloo_pipeline.generation import groups
from rloo_pipeline.generation.sampler import Decoding
from rloo_pipeline.insight import completions as seen
from rloo_pipeline.insight.statistics import Estimate, bootstrap, pass_at_ks
from rloo_pipeline.progress import say
from rloo_pipeline.prompt_set import PromptSet
from rloo_pipeline.seeds import derive
from rloo_pipeline.stages.metrics import length_metrics
from rloo_pipeline.stages.score import score_table
from rloo_pipeline.training import policy


def evaluate(config: Config, prompts: Path, policy_folder: Path, name: str, output: Path, summary: Path) -> None:
    """Evaluates a policy; writes its completions to `output` and what they come to into `summary`."""
    settings = config.evaluation
    held_out = PromptSet(prompts / "eval")
    rows = held_out.rows(list(range(min(len(held_out), settings.num_prompts or len(held_out)))))
    longest = settings.max_completion_length or config.rollout.max_completion_length
    decoding = Decoding(settings.temperature, 1.0, 0, None, longest)
    sampler = groups.load_sampler(policy_folder, config, held_out.longest, longest)
    made = groups.sample_groups(sampler, rows, settings.num_generations, decoding, config.seed, ("evaluation",))
    rolled = pa.Table.from_pylist(made, schema=tables.ROLLOUTS)
    scored = score_table(config, rolled, held_out, policy_folder)
    digest = policy.digest(policy_folder)
    schema = tables.completions_schema([reward.column for reward in config.rewards])
    joined = pa.table([*rolled.columns, *scored.columns[len(tables.KEYS) :]], schema=schema)
    about = groups.facts(config.model, decoding)
    tables.write(
        output, joined, schema, "completions", run=config.run, seed=config.seed, policy=digest, evaluated=name, **about
    )
    found = summarize(config, joined)
    write_json(summary, {"policy": digest, "evaluated": name, **found})
    low, high = found["ci95"]
    say(
        f"{name}: pass@1 {found['accuracy']:.1%} (95% interval {low:.1%} to {high:.1%}) on {len(rows)} held-out prompts"
    )


def summarize(config: Config, table: pa.Table) -> dict[str, Any]:
    """Accuracy, pass@k, rewards, lengths and the breakdown of an evaluation's completions."""
    settings, samples = config.evaluation, config.evaluation.num_generations
    seed = derive(config.seed, "bootstrap")

    def estimate(values: NDArray[np.float64]) -> Estimate:
        return bootstrap(values, settings.bootstrap_samples, seed)

    right = seen.right(table, config.rewards, config.correct, samples)
    passes = {k: estimate(values) for k, values in pass_at_ks(right).items()}
    functions = [reward.column for reward in config.rewards]
    rewards = {name: seen.grid(table[name], samples) for name in [*functions, "reward"]}
    return {
        "prompts": len(right),
        "num_generations": samples,
        "temperature": settings.temperature,
        "accuracy": passes[1].value,
        "ci95": passes[1].ci95,
        "pass@k": {str(k): found._asdict() for k, found in passes.items()},
        "rewards": {name: _mean_estimate(values, estimate) for name, values in rewards.items()},
        "breakdown": {name: _breakdown(right, rewards[name] >= 1.0) for name in settings.breakdown},
        **length_metrics(table),
    }


def _mean_estimate(values: NDArray[np.float64], estimate: Any) -> dict[str, Any] | None:
    """Mean over prompts of the mean over a prompt's scorable samples; None when nothing could be scored."""
    scorable = values[~np.isnan(values).all(axis=1)]
    return estimate(np.nanmean(scorable, axis=1))._asdict() if len(scorable) else None


def _breakdown(right: NDArray[np.bool_], has: NDArray[np.bool_]) -> dict[str, float | None]:
    """Share of completions that have a property, and accuracy among those with and without it."""
    return {
        "share": float(has.mean()),
        "accuracy_with": float(right[has].mean()) if has.any() else None,
        "accuracy_without": float(right[~has].mean()) if (~has).any() else None,
    }
