"""Rows a second of `math_reward` in the worker processes, against the bare function on as many cores.

The completions are the solutions of GSM8K; every other one is that of another problem, so half are wrong.

"Bare" is the function alone: one call on an equal share of the rows in each of as many forked processes, with the
function imported and the rows in memory; nothing is sent, checked or collected. "Scored" is what a stage does once its
table is in memory: the rows cross to workers, a call a prompt, and checked scores come back. Its processes have been
started before, as the stage does while it reads its tables.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from itertools import cycle, islice, pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rloo_pipeline import import_string
from rloo_pipeline.config import Reward
from rloo_pipeline.user_code.dispatch import WorkerPools
from rloo_pipeline.user_code.reward_call import signature_of
from rloo_pipeline.user_code.score_batch import RewardBatch

MATH = "rloo_pipeline.rewards.math:math_reward"
ROWS, SAMPLES = 20_000, 8


def scoring(repeats: int, _: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Rows a second of math_reward in the pool against the bare function on as many cores."""
    if arguments.data is None:
        return {}
    ratios = ratios_to_bare(completions_of(arguments.data, ROWS), 5 * repeats)  # each takes a second
    return {"score_rows_per_s_vs_bare": ratios}


def ratios_to_bare(batch: RewardBatch, repeats: int) -> list[float]:
    """Seconds of the bare function over those of scoring, both on all cores of this process, in turn."""
    function, cores = import_string.load(MATH), len(os.sched_getaffinity(0))
    return [on_bare_cores(function, batch, cores) / in_workers(batch, cores) for _ in range(repeats)]


def completions_of(file: Path, rows: int) -> RewardBatch:
    """So many completions, SAMPLES neighbouring ones a problem: its own solution, another problem's, and so on."""
    problems = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    chosen = [problem for problem in islice(cycle(problems), -(-rows // SAMPLES)) for _ in range(SAMPLES)][:rows]
    texts = [
        chosen[row]["answer"] if row % 2 == 0 else problems[row * 7919 % len(problems)]["answer"] for row in range(rows)
    ]
    columns = {name: [problem[name] for problem in chosen] for name in ("question", "answer")}
    return RewardBatch(columns["question"], texts, [[0]] * rows, columns)


def on_bare_cores(function: Callable[..., Any], batch: RewardBatch, cores: int) -> float:
    """Seconds of calls of the function on equal shares of neighbouring rows, in as many forked processes."""
    offered = {**batch.columns, "prompts": batch.prompts, "completions": batch.completions}
    columns = {name: offered[name] for name in signature_of(function).takes(offered)}
    ends = [len(batch.completions) * part // cores for part in range(cores + 1)]
    fork = multiprocessing.get_context("fork")
    began = time.monotonic()
    children = [
        fork.Process(target=function, kwargs={name: values[low:high] for name, values in columns.items()})
        for low, high in pairwise(ends)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
        if child.exitcode:
            raise SystemExit("the bare function failed")
    return time.monotonic() - began


def in_workers(batch: RewardBatch, workers: int) -> float:
    """Seconds of scoring with workers that have started and imported the function."""
    rows = len(batch.completions)
    samples = [min(SAMPLES, rows - first) for first in range(0, rows, SAMPLES)]
    with WorkerPools([Reward(function=MATH)], workers) as pools:
        for worker in pools.started[0]:
            wait([worker.file])
        began = time.monotonic()
        pools.score(batch, samples)
        return time.monotonic() - began
