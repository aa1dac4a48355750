"""evaluate: a policy and the held-out prompts → completions with scores, and their summary with 95% intervals.

The seeds of the samples do not depend on the policy, so warm start and final policy get the same prompts and seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.config import Config
from rloo_pipeline.evaluation.completions import is_correct, scores_of
from rloo_pipeline.evaluation.statistics import estimate_scores, estimate_share, pass_at_ks
from rloo_pipeline.rollout import groups
from rloo_pipeline.rollout.requests import SamplingConfig
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.scoring.score_table import score_table
from rloo_pipeline.seeds import derive
from rloo_pipeline.stages.probe import join_scores
from rloo_pipeline.training.lengths import length_metrics


class EvaluationOutputs(NamedTuple):
    """Files that an evaluation writes."""

    sampled: Path
    greedy: Path
    """Empty where evaluation.greedy is false, or where the sampled completions are greedy already."""
    summary: Path


def evaluate(config: Config, prompts: Path, policy_folder: Path, name: str, outputs: EvaluationOutputs) -> None:
    """Evaluates a policy; writes its completions and their summary.

    Args:
        config: of the stage.
        prompts: folder of the held-out prompts.
        policy_folder: the policy.
        name: of the evaluation, such as `warmstart`, `final` or `test`.
        outputs: files to write.
    """
    settings = config.evaluation
    held_out = PromptSet(prompts)
    rows = held_out.rows(list(range(min(len(held_out), settings.num_prompts or len(held_out)))))
    longest = settings.max_completion_length or config.rollout.max_completion_length
    sampling = SamplingConfig(settings.temperature, 1.0, 0, None, longest)
    sampler = groups.load_sampler(policy_folder, config, held_out, longest)
    digest = sampler.digest

    def sample(path: Path, kind: str, samples: int, how: SamplingConfig, prompt_rows: list[dict[str, Any]]) -> pa.Table:
        draw = groups.Draw(prompt_rows, samples, how, groups.EVALUATION)
        [completions] = groups.sample_groups(sampler, config, draw)
        rolled = pa.Table.from_pylist(completions, schema=groups.schema(config))
        joined = join_scores(config, rolled, score_table(config, rolled, held_out, policy_folder))
        about = {"run": config.run, "seed": config.seed, "policy": digest, "evaluated": name}
        tables.write(path, joined, joined.schema, kind, **about, **groups.sampling_facts(config.model, how))
        return joined

    sampled = sample(outputs.sampled, "completions", settings.num_generations, sampling, rows)
    with_greedy = settings.greedy and settings.temperature > 0
    greedy = sample(outputs.greedy, "greedy", 1, sampling._replace(temperature=0.0), rows if with_greedy else [])
    summary = summarize(config, sampled) | {"greedy": summarize(config, greedy, 1, 0.0) if with_greedy else None}
    write_json(outputs.summary, {"policy": digest, "evaluated": name, **summary})
    low, high = summary["ci95"]
    greedy_text = f"; greedy {summary['greedy']['accuracy']:.1%}" if with_greedy else ""
    say(
        f"{name}: pass@1 {summary['accuracy']:.1%} (95% interval {low:.1%} to {high:.1%}){greedy_text}, "
        f"on {len(rows)} held-out prompts"
    )


def summarize(
    config: Config, table: pa.Table, samples: int | None = None, temperature: float | None = None
) -> dict[str, Any]:
    """Accuracy, pass@k, rewards, lengths and breakdown of an evaluation's completions.

    Args:
        config: of the stage.
        table: completions with scores.
        samples, temperature: of the table, by default those of the configuration.
    """
    settings = config.evaluation
    samples = samples or settings.num_generations
    temperature = settings.temperature if temperature is None else temperature
    seed = derive(config.seed, "bootstrap")
    right = is_correct(table, config.rewards, config.correct, samples)
    passes = {k: estimate_share(values, samples // k) for k, values in pass_at_ks(right).items()}
    functions = [reward.column for reward in config.rewards]
    rewards = {name: scores_of(table, name, samples) for name in [*functions, "reward"]}
    means = {name: estimate_scores(values, settings.bootstrap_samples, seed) for name, values in rewards.items()}
    return {
        "prompts": len(right),
        "num_generations": samples,
        "temperature": temperature,
        "accuracy": passes[1].value,
        "ci95": passes[1].ci95,
        "pass@k": {str(k): estimate._asdict() for k, estimate in passes.items()},
        "rewards": {name: estimate and estimate._asdict() for name, estimate in means.items()},
        "breakdown": {name: _breakdown(right, rewards[name] >= 1.0) for name in settings.breakdown},
        **length_metrics(table),
    }


def _breakdown(right: NDArray[np.bool_], has: NDArray[np.bool_]) -> dict[str, float | None]:
    """Share of completions with a property, and accuracy of those with and without it."""
    return {
        "share": float(has.mean()),
        "accuracy_with": float(right[has].mean()) if has.any() else None,
        "accuracy_without": float(right[~has].mean()) if (~has).any() else None,
    }
