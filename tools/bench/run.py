"""`make bench`: speed in numbers, each against something that ran beside it.

    python tools/bench/run.py [--only NAME ...] [--repeats 3] [--data gsm8k/train.jsonl]

Ratios and their spread, never a time alone, except where a number's name says seconds. The result is
results/bench/bench.json: {number: {"value": median, "min", "max", "repeats"}}; numbers of parts that
do not run are kept. `--check` also compares with tools/bench/stored.json: a ratio that is worse by a tenth fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import data_parallel
import handover
import long_run
import nodes
import overlap
import scoring
import shapes
import split
import step
import whole
from rich.console import Console
from rich.table import Table

from rloo_pipeline.runtime import environment

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "results" / "bench" / "bench.json"
STORED = Path(__file__).with_name("stored.json")
SMALLER_IS_BETTER = ("memory", "seconds", "overhead", "idle")
DEMO = ("--config", "run=bench", "evaluation={each_round: 0}")
"""TRL does not evaluate in each round, so neither side does."""
DEMO_ROUNDS, LARGE_ROUNDS = 10, 3

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

Numbers = Mapping[str, list[float]]


def update(repeats: int, folder: Path, _: argparse.Namespace) -> Numbers:
    """Our optimizer step against TRL's on the same batch: vocabulary 151,936, and a small model."""
    figures: dict[str, list[float]] = {}
    for name in shapes.SHAPES:
        whole.script("shapes.py", name, folder / name)  # Linux counts what a parent holds as its child's peak
        count = repeats * shapes.SHAPES[name].steps
        ours, trl = _in_turns(name, folder / name, count)
        suffix = "" if name == "large" else f"_{name}"
        steps = list(zip(trl["update"], ours["update"], strict=True))
        passes = list(zip(trl["passes"], ours["passes"], strict=True))
        figures[f"update_tokens_per_s_vs_trl{suffix}"] = [a / b for a, b in steps]
        figures[f"after_sampling_tokens_per_s_vs_trl{suffix}"] = [
            (a + c) / (b + d) for (a, b), (c, d) in zip(steps, passes, strict=True)
        ]
        figures[f"update_peak_memory_vs_trl{suffix}"] = [ours["peak_mb"] / trl["peak_mb"]]
    return figures


def _in_turns(name: str, folder: Path, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our side's and TRL's steps of a shape, one after the other."""
    sides = [_steps(side, name, folder, repeats) for side in ("ours", "trl")]
    for _ in range(1 + repeats):
        for side in sides:
            next(side)
    ours, theirs = (json.loads(next(side)) for side in sides)
    return ours, theirs


def _steps(side: str, name: str, folder: Path, repeats: int) -> Iterator[str]:
    """Starts a process of step.py, and then has it do a step for each line that is asked for. The last line has lists
    of seconds, and its peak memory in MB.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, str(Path(__file__).with_name("step.py")), side, name, str(folder), str(repeats)]
    variables = {**os.environ, **ONE_THREAD, **(environment.JOBS if side == "ours" else {})}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    before = ""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=variables, stderr=errors, text=True, **pipes)
        assert process.stdin is not None
        for line in process.stdout or ():
            if line.strip() == step.TURN:
                yield before
                process.stdin.write("\n")
                process.stdin.flush()
            before = line
        if process.wait():
            errors.seek(0)
            raise SystemExit(errors.read()[-3000:])
    yield before


def rollout(repeats: int, folder: Path, _: argparse.Namespace) -> Numbers:
    """The rollout stage with a warm engine against vLLM's `generate` alone, on the same requests."""
    return {"rollout_tokens_per_s_vs_vllm": whole.last_line(whole.script("sampling.py", folder, repeats))}


def host(repeats: int, folder: Path, _: argparse.Namespace) -> Numbers:
    """CPU seconds of the process that samples, for a million tokens, by an engine without a model."""
    sides = {"": (), "_one_process": ("inside",), "_generate": ("bare",)}
    outputs = {
        name: whole.script("host.py", folder, repeats, *options, VLLM_LOGGING_LEVEL="ERROR")
        for name, options in sides.items()
    }
    return {f"host_cpu_seconds{name}": whole.last_line(output) for name, output in outputs.items()}


def limits(repeats: int, folder: Path, _: argparse.Namespace) -> Numbers:
    """An update's matrix products against `torch.matmul`; a decoding step's reads against the memory's bandwidth."""
    whole.script("shapes.py", "large", folder)
    one_thread = {**environment.JOBS, **ONE_THREAD}
    parts = [whole.script("limits.py", part, folder, repeats, **one_thread) for part in ("update", "rollout")]
    return {name: values for part in parts for name, values in whole.last_line(part).items()}


def demo(repeats: int, folder: Path, _: argparse.Namespace) -> Numbers:
    """The demo's rounds against TRL; what a round costs beside its work, warm and cold, against empty jobs."""
    started = whole.Project(folder / "start", "bench", *DEMO, "workers=auto").start()
    figures: dict[str, list[float]] = {}
    for number in range(repeats):
        warm = started.copy(folder / f"warm-{number}")
        whole.against_trl(figures, "demo", warm, DEMO_ROUNDS, 1)
        whole.add(figures, "round_overhead_seconds", _overheads(warm, DEMO_ROUNDS))
    empty = whole.empty_rloo(folder / "bin")
    floor = whole.Project(folder / "floor", "bench", *DEMO, "workers=never").start(empty)
    floor.rounds(DEMO_ROUNDS, empty)
    seconds = floor.seconds(DEMO_ROUNDS)
    cold = started.copy(folder / "cold")
    cold.configuration = (*DEMO, "workers=never")
    cold.rounds(repeats + 1)
    return {
        **figures,
        "round_floor_seconds": seconds,
        "round_overhead_vs_floor": [over / statistics.median(seconds) for over in figures["round_overhead_seconds"]],
        "round_overhead_cold_seconds": _overheads(cold, repeats + 1),
    }


def large(_: int, folder: Path, arguments: argparse.Namespace) -> Numbers:
    """The larger shape, whose rounds take a minute and more, against TRL; and what of a round is overhead."""
    configuration = ["--configfile", str(Path(__file__).with_name("large.yaml").relative_to(ROOT))]
    changes = ["--config", *arguments.large] if arguments.large else []
    started = whole.Project(folder / "large", "bench", *configuration, *changes).start()
    figures: dict[str, list[float]] = {}
    whole.against_trl(figures, "large", started, LARGE_ROUNDS, 2)
    walls = started.seconds(LARGE_ROUNDS)
    shares = [over / wall for over, wall in zip(_overheads(started, LARGE_ROUNDS), walls, strict=True)]
    return {**figures, "round_overhead_share_large": shares, "round_large_seconds": walls}


def _overheads(project: whole.Project, rounds: int) -> list[float]:
    """Of each round but the first: its seconds less those in which it sampled and trained."""
    return [wall - own for wall, own in zip(project.seconds(rounds), project.worked(rounds), strict=True)]


def plan(repeats: int, _: Path, __: argparse.Namespace) -> Numbers:
    """Seconds of a dry run of 10, 100 and 1,000 rounds of 8 shards."""
    command = [sys.executable, "-m", "snakemake", "-n", "-q", "--configfile", ".test/config/config.yaml", "--config"]
    figures: dict[str, list[float]] = {}
    for count in (10, 100, 1000):
        for _repeat in range(repeats):
            began = time.monotonic()
            full_command = [*command, "run=plan", f"rounds={count}", "rollout={shards: 8}"]
            subprocess.run(full_command, cwd=ROOT, check=True, capture_output=True)
            figures.setdefault(f"plan_seconds_{count}_rounds", []).append(time.monotonic() - began)
    return figures


PARTS: Mapping[str, Callable[[int, Path, argparse.Namespace], Numbers]] = {
    "update": update,
    "rollout": rollout,
    "host": host,
    "limits": limits,
    "demo": demo,
    "large": large,
    "handover": handover.handover,
    "overlap": overlap.in_turns,
    "overlap_trl": overlap.against_trl,
    "overlap_slurm": overlap.on_slurm,
    "nodes": nodes.in_a_job,
    "plan": plan,
    "long": long_run.long_run,
    "data_parallel": data_parallel.data_parallel,
    "scoring": scoring.scoring,
    "split": split.split,
}


def main() -> None:
    """Measures, prints a table, writes the result, and with --check compares it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", action="extend", choices=list(PARTS), help="parts to run (default: all)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, help="GSM8K's train.jsonl, for scoring; without it that is left out")
    parser.add_argument(
        "--large", nargs="+", metavar="KEY=VALUE", help="changes to large.yaml or handover.yaml, to try it with less"
    )
    parser.add_argument("--check", action="store_true", help="fail where a ratio is worse than the stored one by 10%%")
    arguments = parser.parse_args()
    figures = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.only or PARTS:
        print(f"bench: {name}: {PARTS[name].__doc__}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="rloo-bench-") as folder:
            for number, values in PARTS[name](arguments.repeats, Path(folder), arguments).items():
                figures[number] = _summary(values)
        RESULT.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")  # the next part may take long
    _show(figures)
    if arguments.check and (worse := _worse(figures)):
        raise SystemExit("bench: worse than stored: " + "; ".join(worse))


def _summary(values: list[float]) -> dict[str, float]:
    return {"value": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def _worse(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Ratios that are worse than the stored ones by more than a tenth; seconds are another machine's and not looked
    at.
    """
    stored = json.loads(STORED.read_text())
    worse = []
    for name in sorted(stored.keys() & figures.keys()):
        if "seconds" in name or name.startswith(shapes.STEP):
            continue
        small, now, was = any(word in name for word in SMALLER_IS_BETTER), figures[name]["value"], stored[name]["value"]
        if now > 1.1 * was if small else now < 0.9 * was:
            worse.append(f"{name} {now:.3g}, was {was:.3g}")
    return worse


def _show(figures: Mapping[str, Mapping[str, float]]) -> None:
    table = Table("number", "median", "least", "most", "repeats")
    for name, values in sorted(figures.items()):
        table.add_row(name, *(f"{values[key]:.3g}" for key in ("value", "min", "max", "repeats")))
    Console().print(table)


if __name__ == "__main__":
    main()
