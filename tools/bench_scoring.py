"""Rows a second of a reward function in the worker processes, against the bare function on as many cores.

    python tools/bench_scoring.py --data data/gsm8k/train.jsonl --rows 20000 --workers 2

The completions are the solutions of GSM8K; every other one is that of another problem, so half are wrong.

"Bare" is the function alone: one call on an equal share of the rows in each of as many forked processes, with the
function imported and the rows in memory; nothing is sent, checked or collected. "Scored" is what a stage does once its
table is in memory: the rows cross to workers, a call a prompt, and checked scores come back. Its processes have been
started before, as the stage does while it reads its tables; "start" says what that takes from nothing, and "with start"
is the ratio with all of it waited for. The library is math-verify's `parse` and `verify` on every row and nothing else.

Everything is timed in turn, `--repeat` times, in one run; a ratio is of neighbouring measurements, and its median and
range are given. CPU seconds are of all processes; other work on the machine changes them less than it does wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline import import_string
from rloo_pipeline.config import Reward
from rloo_pipeline.scoring.dispatch import WorkerPools
from rloo_pipeline.scoring.reward_call import signature_of
from rloo_pipeline.scoring.score_batch import RewardBatch

MATH = "rloo_pipeline.rewards.math:math_reward"
LIBRARY = f"{Path(__file__).with_name('library_reward.py')}:library_reward"
SAMPLES = 8


class Time(NamedTuple):
    """Wall and CPU seconds of a measurement."""

    wall: float
    cpu: float
    """Of this process and of all its children that have ended."""


class Turn(NamedTuple):
    """One repetition."""

    bare: Time
    start: Time
    scored: Time


def score_rows_per_s_vs_bare(
    data: Path, rows: int = 20_000, workers: int | None = None, repeats: int = 5, function: str = MATH
) -> dict[str, float]:
    """Rows a second as a stage scores them, divided by those of the bare function on as many cores.

    Args:
        data: GSM8K's train.jsonl.
        rows: completions to score.
        workers: processes; all cores of this process where not given.
        repeats: measurements of both, in turn.
        function: the reward function.

    Returns:
        `value`, the median of the repetitions' ratios, `min` and `max` of them, and `repeats`.
    """
    turns = measured(function, completions_of(data, rows), workers or cores(), repeats)
    return spread([turn.bare.wall / turn.scored.wall for turn in turns])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, range and number of some measurements."""
    return {"value": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def main() -> None:
    """Prints what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument(
        "--library-rows", type=int, default=2_000, help="rows for the library, which is slow; 0 for none"
    )
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--function", default=MATH)
    arguments = parser.parse_args()
    turns = measured(
        arguments.function, completions_of(arguments.data, arguments.rows), arguments.workers, arguments.repeat
    )
    figures = {
        "function": arguments.function,
        "rows": arguments.rows,
        "workers": arguments.workers,
        **of(turns, arguments.rows),
    }
    if arguments.library_rows:
        fewer = completions_of(arguments.data, arguments.library_rows)
        library = measured(LIBRARY, fewer, arguments.workers, arguments.repeat)
        per_row = [turn.bare.wall / arguments.library_rows for turn in library]
        times = [bare * arguments.rows / turn.scored.wall for bare, turn in zip(per_row, turns, strict=True)]
        figures["library"] = {"rows": arguments.library_rows, **of(library, arguments.library_rows)}
        figures["rows/s, function scored vs bare library"] = spread(times)
    print(json.dumps(rounded(figures), indent=1))


def of(turns: list[Turn], rows: int) -> dict[str, Any]:
    """The figures of all repetitions."""
    return {
        "rows/s scored": spread([rows / turn.scored.wall for turn in turns]),
        "rows/s bare": spread([rows / turn.bare.wall for turn in turns]),
        "rows/s, scored vs bare": spread([turn.bare.wall / turn.scored.wall for turn in turns]),
        "rows/s, scored with start vs bare": spread(
            [turn.bare.wall / (turn.start.wall + turn.scored.wall) for turn in turns]
        ),
        "seconds of start": spread([turn.start.wall for turn in turns]),
        "CPU seconds bare": spread([turn.bare.cpu for turn in turns]),
        "CPU seconds scored": spread([turn.scored.cpu for turn in turns]),
        "CPU seconds of start": spread([turn.start.cpu for turn in turns]),
        "CPU, bare / scored": spread([turn.bare.cpu / turn.scored.cpu for turn in turns]),
    }


def rounded(figures: Any) -> Any:
    """The figures with four digits."""
    if isinstance(figures, dict):
        return {name: rounded(value) for name, value in figures.items()}
    return float(f"{figures:.4g}") if isinstance(figures, float) else figures


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def completions_of(file: Path, rows: int) -> RewardBatch:
    """So many completions, SAMPLES neighbouring ones a problem: its own solution, another problem's, and so on."""
    problems = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    chosen = [problem for problem in islice(cycle(problems), -(-rows // SAMPLES)) for _ in range(SAMPLES)][:rows]
    texts = [
        chosen[row]["answer"] if row % 2 == 0 else problems[row * 7919 % len(problems)]["answer"] for row in range(rows)
    ]
    columns = {name: [problem[name] for problem in chosen] for name in ("question", "answer")}
    return RewardBatch(columns["question"], texts, [[0]] * rows, columns)


def measured(reference: str, batch: RewardBatch, workers: int, repeats: int) -> list[Turn]:
    """Measures scoring and the bare function in turn."""
    function = import_string.load(reference)
    turns = []
    for _ in range(repeats):
        bare = timed(lambda: on_bare_cores(function, batch, workers))
        turns.append(Turn(bare, *in_workers(reference, batch, workers)))
    return turns


def timed(work: Callable[[], None]) -> Time:
    """Wall and CPU seconds."""
    began, before = time.monotonic(), cpu_seconds()
    work()
    return Time(time.monotonic() - began, cpu_seconds() - before)


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def on_bare_cores(function: Callable[..., Any], batch: RewardBatch, processes: int) -> None:
    """Calls the function on an equal share of the rows in each of so many forked processes."""
    children = [fork(function, share(batch, part, processes)) for part in range(processes)]
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise SystemExit("the bare function failed")


def share(batch: RewardBatch, part: int, parts: int) -> RewardBatch:
    """An equal part of neighbouring rows."""
    rows = len(batch.completions)
    part_of_rows = slice(rows * part // parts, rows * (part + 1) // parts)
    columns = {name: values[part_of_rows] for name, values in batch.columns.items()}
    ids = batch.completion_ids and batch.completion_ids[part_of_rows]
    return RewardBatch(batch.prompts[part_of_rows], batch.completions[part_of_rows], ids, columns)


def fork(function: Callable[..., Any], batch: RewardBatch) -> int:
    """Starts a process that makes one call and ends; its id."""
    own = {"prompts": batch.prompts, "completions": batch.completions, "completion_ids": batch.completion_ids}
    offered = {**batch.columns, **own}
    if child := os.fork():
        return child
    code = 1
    try:
        function(**{name: offered[name] for name in signature_of(function).takes(offered)})
        code = 0
    finally:
        os._exit(code)


def in_workers(reference: str, batch: RewardBatch, workers: int) -> tuple[Time, Time]:
    """Starts processes and ends them; then does so again and scores with them. CPU time is known when they have ended:
    that of scoring is what the second time takes more.
    """
    rows = len(batch.completions)
    samples = [min(SAMPLES, rows - first) for first in range(0, rows, SAMPLES)]
    before = cpu_seconds()
    with ready(reference, workers):
        pass
    start_cpu = cpu_seconds() - before
    began = time.monotonic()
    with ready(reference, workers) as pools:
        started = time.monotonic()
        pools.score(batch, samples)
        done = time.monotonic()
    scored_cpu = cpu_seconds() - before - 2 * start_cpu
    return Time(started - began, start_cpu), Time(done - started, scored_cpu)


@contextmanager
def ready(reference: str, workers: int) -> Iterator[WorkerPools]:
    """Workers that have imported the function."""
    with WorkerPools([Reward(function=reference)], workers) as pools:
        for worker in pools.started[0]:
            wait([worker.channel.file])
        yield pools


if __name__ == "__main__":
    main()
