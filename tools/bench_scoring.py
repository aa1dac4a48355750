"""Rows a second of a reward function in the pool, against the bare function on as many cores.

    python tools/bench_scoring.py data/gsm8k/train.jsonl --rows 20000 --workers 2

The completions are the solutions of GSM8K; every other one is that of another problem, so half are wrong. "Bare" is the
function alone on equal shares of the rows, in as many processes at a time, already imported and with nothing sent
anywhere. Both are timed in turn, several times, and the least of each counts: on a machine with other work the least is
what is nearest to the machine itself. CPU seconds are given as well; these other work changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rloo_pipeline import references
from rloo_pipeline.config import Reward
from rloo_pipeline.rewards.calls import signature_of
from rloo_pipeline.rewards.scoring import Batch, score_all

MATH = "rloo_pipeline.rewards.math:math_reward"


def main() -> None:
    """Prints one line a repetition and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="GSM8K's train.jsonl")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--samples", type=int, default=8, help="completions of a prompt, which are one call")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--function", default=MATH)
    words = parser.parse_args()
    batch = completions_of(words.data, words.rows, words.samples)
    bare, pool = [], []
    for _ in range(words.repeat):
        bare.append(timed(lambda: on_bare_cores(words.function, batch, words.workers)))
        pool.append(timed(lambda: in_pool(words.function, batch, words.samples, words.workers)))
        for name, (wall, cpu) in (("bare", bare[-1]), ("pool", pool[-1])):
            print(f"{name}: {wall:.2f} s, {cpu:.2f} CPU s, {words.rows / wall:.0f} rows/s", flush=True)
    (bare_wall, bare_cpu), (pool_wall, pool_cpu) = (tuple(map(min, zip(*found, strict=True))) for found in (bare, pool))
    print(f"pool / bare on {words.workers} cores: {pool_wall / bare_wall:.3f} wall, {pool_cpu / bare_cpu:.3f} CPU")


def completions_of(file: Path, rows: int, samples: int) -> Batch:
    """So many completions, `samples` neighbouring ones a problem: its own solution, another problem's, and so on."""
    problems = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    asked = [problem for problem in islice(cycle(problems), -(-rows // samples)) for _ in range(samples)][:rows]
    texts = [
        asked[row]["answer"] if row % 2 == 0 else problems[row * 7919 % len(problems)]["answer"] for row in range(rows)
    ]
    columns = {name: [problem[name] for problem in asked] for name in ("question", "answer")}
    return Batch(columns["question"], texts, [[0]] * rows, columns)


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds, those of all child processes included."""
    began, before = time.monotonic(), cpu_seconds()
    work()
    return time.monotonic() - began, cpu_seconds() - before


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def on_bare_cores(reference: str, batch: Batch, cores: int) -> None:
    """Calls the function on an equal share of the rows in each of `cores` forked processes."""
    function = references.load(reference)
    children = [fork(function, share(batch, part, cores)) for part in range(cores)]
    for child in children:
        if os.waitpid(child, 0)[1]:
            raise SystemExit("the bare function failed")


def share(batch: Batch, part: int, parts: int) -> Batch:
    """Every `parts`-th row."""
    columns = {name: values[part::parts] for name, values in batch.columns.items()}
    return Batch(batch.prompts[part::parts], batch.completions[part::parts], batch.completion_ids[part::parts], columns)


def fork(function: Callable[..., Any], batch: Batch) -> int:
    """Starts a process that makes one call and ends; its id."""
    offered = {**batch.columns, "prompts": batch.prompts, "completions": batch.completions}
    offered["completion_ids"] = batch.completion_ids
    if child := os.fork():
        return child
    code = 1
    try:
        function(**{name: offered[name] for name in signature_of(function).takes(offered)})
        code = 0
    finally:
        os._exit(code)


def in_pool(reference: str, batch: Batch, samples: int, workers: int) -> None:
    """Scores the same rows as a stage does, start of the processes included."""
    rows = len(batch.completions)
    groups = [min(samples, rows - first) for first in range(0, rows, samples)]
    score_all([Reward(function=reference)], batch, groups, workers)


if __name__ == "__main__":
    main()
