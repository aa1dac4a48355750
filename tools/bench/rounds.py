"""What a round costs beside sampling and training: with workers, without, and with jobs that do nothing.

The jobs that do nothing are those of the same rounds (rollout, score, update), as rules whose shell is `touch`: what
Snakemake itself takes, in the same run of the benchmark on the same machine.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

EMPTY = """
rule all:
    input: "{last:05d}/update"
rule rollout:
    input: lambda w: f"{{int(w.round) - 1:05d}}/update" if int(w.round) > 1 else []
    output: "{{round}}/rollout"
    shell: "touch {{output}}"
rule score:
    input: "{{round}}/rollout"
    output: "{{round}}/score"
    shell: "touch {{output}}"
rule update:
    input: "{{round}}/rollout", "{{round}}/score"
    output: "{{round}}/update"
    shell: "touch {{output}}"
"""


def snakemake(folder: Path, *words: str) -> None:
    """Runs it, silent unless it fails.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "snakemake", "--cores", "all", *words]
    outcome = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise SystemExit(f"{' '.join(command)}: {outcome.stderr[-3000:]}")


def floor(folder: Path, rounds: int) -> list[float]:
    """Seconds of each round of empty jobs but the first."""
    folder.mkdir(parents=True)
    (folder / "Snakefile").write_text(EMPTY.format(last=rounds))
    snakemake(folder)
    return _between([folder / f"{number:05d}" / "update" for number in range(1, rounds + 1)])


def overhead(project: Path, folder: Path, rounds: int, workers: str) -> list[float]:
    """Seconds of each round of the demo but the first, less those in which it sampled and trained.

    Args:
        project: this repository.
        folder: an empty one to run in.
        rounds: how many.
        workers: as in the configuration.
    """
    folder.mkdir(parents=True)
    for name in ("Snakefile", "workflow", "config", "rloo_pipeline", "requirements", "containers"):
        (folder / name).symlink_to(project / name)
    run = folder / "results" / "bench"
    names = [f"{number:05d}" for number in range(1, rounds + 1)]
    target = f"results/bench/policies/{names[-1]}"
    snakemake(folder, "--config", "run=bench", f"rounds={rounds}", f"workers={workers}", "--", target)
    walls = _between([run / "rounds" / name / "metrics.json" for name in names])
    worked = [_seconds(run / "logs", name) for name in names[1:]]
    return [wall - own for wall, own in zip(walls, worked, strict=True)]


def _between(files: list[Path]) -> list[float]:
    """Seconds from the making of each file to that of the next."""
    return [(b.stat().st_mtime_ns - a.stat().st_mtime_ns) / 1e9 for a, b in pairwise(files)]


def _seconds(logs: Path, name: str) -> float:
    """What the stages of a round say that sampling and training took."""
    said = [*logs.glob(f"rollout/{name}-*.log"), logs / "update" / f"{name}.log"]
    return sum(float(re.findall(r"(?:sampled|trained) in ([\d.]+) s", log.read_text())[-1]) for log in said)


def ratio_to_floor(over: list[float], empty: list[float]) -> list[float]:
    """Each round's overhead by the middle one of the empty rounds."""
    return [value / statistics.median(empty) for value in over]


def environment() -> None:
    """So that `rloo` is that of this interpreter."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
