"""checks: judges a probe of policy 0 before any compute is spent on updates → checks.json, or checks.failed.json.

The run stops if a check fails and `checks.accept` does not name it.
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloo_pipeline.artifacts import assets as asset_files
from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import read_artifact, write_json
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import PromptSet
from rloo_pipeline.checks.evidence import Evidence
from rloo_pipeline.checks.group_stats import success_distribution
from rloo_pipeline.checks.registry import judge, threshold
from rloo_pipeline.checks.statistics import Array
from rloo_pipeline.config import Config
from rloo_pipeline.errors import RefusedPolicyError
from rloo_pipeline.judging.completions import is_correct, scores_of
from rloo_pipeline.judging.token_facts import token_facts
from rloo_pipeline.runtime import progress, ranks
from rloo_pipeline.seeds import derive, permutation
from rloo_pipeline.training import forward_only, round_data, sampler_proof, self_check
from rloo_pipeline.training.demonstrations import demonstrations
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences

Verdicts = list[dict[str, Any]]

HISTOGRAM_BINS = 24
"""Number of bins in the histogram of lengths."""
LARGEST_K = 64
"""Largest K for which the expected share of mixed groups is computed."""


def checks(
    config: Config,
    assets: Path,
    prompts: Path,
    policy: Policy,
    probe: Path,
    output: Path,
    reward_model: Path | None = None,
) -> None:
    """Runs the checks on a policy and writes their verdicts; every rank of a split model calls this.

    Args:
        config: the stage's configuration.
        assets: folder that `stage-assets` wrote, for the demonstrations.
        prompts: folder that the stage `prompts` wrote.
        policy: policy 0.
        probe: table that probe wrote.
        output: checks.json.
        reward_model: checks.json of the run's own reward model, if it has one.

    Raises:
        RefusedPolicyError: a check fails and is not accepted.
    """
    table = tables.read(probe, "probe", policy=policy.digest)
    preferences = None if reward_model is None else read_artifact(reward_model)
    evidence = gather(config, assets, prompts, policy, table, preferences)
    if not ranks.current().first:
        return
    verdicts = judge(evidence, config.checks.limits.by_name(config.sampler_format), config.checks.accept)
    say_checks(verdicts)
    failed = [check for check in verdicts if check["verdict"] == "fail" and not check["accepted"]]
    refused = output.with_suffix(".failed.json")
    refused.unlink(missing_ok=True)
    path = refused if failed else output
    write_json(
        path,
        {
            "policy": tables.footer(table)["policy"],
            "prompts": len(evidence.rewards),
            "num_generations": evidence.rewards.shape[1],
            sampler_proof.KEY: _mean_size(evidence.differences),
            **({sampler_proof.FORMAT: config.sampler_format} if config.rollout.quantization else {}),
            "accept": config.checks.accept,
            "checks": verdicts,
            **_distributions(evidence),
        },
    )
    if failed:
        advice = "; ".join(f"{check['name']}: {check['advice']}" for check in failed)
        raise RefusedPolicyError(
            f"{policy}: the warm start does not pass its checks ({path}; report.html has completions): {advice} "
            f"To go on anyway: checks.accept: [{', '.join(check['name'] for check in failed)}]"
        )


def gather(
    config: Config,
    assets: Path,
    prompts: Path,
    policy: Policy,
    table: pa.Table,
    preferences: dict[str, Any] | None = None,
) -> Evidence:
    """Collects the evidence for the checks, from the probe and from forward passes of the trainer's model;
    `preferences` is the measurement of the stage `reward_model`.
    """
    samples = int(tables.footer(table)["num_generations"])
    prompt_ids = table["prompt_id"].to_pylist()[::samples]
    prompt_rows = PromptSet(prompts / "train").by_id(prompt_ids)
    texts = table["completion"].to_pylist()
    lengths = np.array(tables.sampled_lengths(table)).reshape(-1, samples)
    truncated = np.array([reason != "stop" for reason in table["finish_reason"].to_pylist()]).reshape(-1, samples)
    logprobs = forward_only.load_configured(config, policy, config.rollout.temperature)
    tokens = config.deepspeed.micro_batch_tokens
    sequences = round_data.sequences_of(table, prompts, policy)
    scored = forward_only.score(logprobs, sequences, tokens, "log-probs", entropies=True)
    differences = None
    if not (config.rollout.cut_by or config.rollout.masked_by):
        differences = _flat(table["sampling_logps"].to_pylist()) - _flat(scored.logps)
    trained, held_out = _demonstration_logps(config, assets, prompts, policy, logprobs)
    logprobs.discard()  # else a worker would keep it on the GPU for all rounds
    return Evidence(
        packed=self_check.load_or_run(policy).logps,
        tokens=token_facts(config, policy, [prompt_rows[prompt_id] for prompt_id in prompt_ids]),
        dtype=config.sampler_format,
        longest=config.rollout.max_completion_length,
        rewards=scores_of(table, "reward", samples),
        rewarded=any(reward.weight for reward in config.rewards),
        right=is_correct(config, table, samples),
        lengths=lengths,
        truncated=truncated,
        texts=[texts[first : first + samples] for first in range(0, len(texts), samples)],
        in_form=_in_form(config, table, samples),
        differences=differences,
        entropies=_flat(scored.entropies),
        demonstrations=trained,
        held_out=held_out,
        preferences=preferences,
        num_generations=config.rollout.num_generations,
        seed=derive(config.seed, "bootstrap"),
    )


def _demonstration_logps(
    config: Config, assets: Path, prompts: Path, policy: Policy, logprobs: TokenLogProbs
) -> tuple[Array | None, Array | None]:
    """Log-probs of the tokens of some demonstrations: first those that SFT trains on, then held-out ones."""
    section = config.warmstart.sft
    if section is None:
        return None, None
    path = asset_files.read(assets, "demonstrations")["demonstrations"]["path"]
    examples = demonstrations(config, section, path, policy, prompts)
    logprobs.temperature = 1.0

    def logps(pairs: Sequence[tuple[list[int], list[int]]], name: str) -> Array | None:
        indices = permutation(len(pairs), derive(config.seed, "perplexity", name))[: config.checks.demonstrations]
        if not indices:
            return None
        columns: list[Any] = [*zip(*(pairs[index] for index in indices), strict=True)]
        tokens = config.deepspeed.micro_batch_tokens
        return _flat(forward_only.score(logprobs, Sequences(*columns), tokens, name).logps)

    pairs = list(zip(examples.trained.prompts, examples.trained.completions, strict=True))
    return logps([(list(p), list(c)) for p, c in pairs], "demonstrations"), logps(examples.held_out, "held out")


def _in_form(config: Config, table: pa.Table, samples: int) -> NDArray[np.bool_] | None:
    """True for completions in the required format, [prompts, samples]; None if no reward function measures it."""
    functions = [reward.column for reward in config.rewards]
    name = config.checks.format_reward or ("format" if "format" in functions else None)
    return None if name is None else np.nan_to_num(scores_of(table, name, samples)) >= 1.0


def _distributions(evidence: Evidence) -> dict[str, Any]:
    """Distributions for the report: lengths, correct completions per group, expected share of mixed groups by K."""
    counts, edges = np.histogram(evidence.lengths, bins=HISTOGRAM_BINS, range=(0, max(evidence.longest, 1)))
    distribution = success_distribution(evidence.right)
    ks = [2**power for power in range(1, LARGEST_K.bit_length())]
    samples = evidence.right.shape[1]
    return {
        "lengths": {"edges": edges.tolist(), "counts": counts.tolist()},
        "right_in_group": np.bincount(evidence.right.sum(axis=1), minlength=samples + 1).tolist(),
        "expected_mixed": {str(k): distribution.mixed(k) for k in ks} if distribution else None,
    }


def say_checks(verdicts: Verdicts) -> None:
    """Shows the checks as a table on the terminal and in the log, and below it what to do about those that do not
    pass.
    """
    from rich.table import Table

    from rloo_pipeline.runtime.console import Terminal

    table = Table(show_edge=False)
    for heading in ("check", "", "value", "limits"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "check")
    for check in verdicts:
        verdict = f"{check['verdict']}, accepted" if check["accepted"] else check["verdict"]
        table.add_row(check["name"], verdict, check["shown"], threshold(check["limits"]))
    text = io.StringIO()
    # Snakemake's logger plugin sets COLUMNS if it passes the output of a stage on to a terminal
    width = progress.console.width if progress.console.is_terminal or "COLUMNS" in os.environ else 160
    Terminal(file=text, width=max(width, 80)).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    lines += [f"{one['name']}: {one['advice']}" for one in verdicts if one["verdict"] != "pass"]
    progress.say("\n" + "\n".join(lines))


def _mean_size(differences: Array | None) -> float | None:
    if differences is None or not len(differences) or not np.isfinite(differences).all():
        return None
    return float(np.abs(differences).mean())


def _flat(values: Sequence[Sequence[float]]) -> Array:
    return np.array([value for row in values for value in row], dtype=np.float64)
