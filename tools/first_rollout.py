"""Measures the seconds and keystrokes from a model and 200 questions to the first rollout.

Makes a small model and a file of questions, calls `rloo init` and `rloo run` as a user would type them, and ends the
run when the first rollout is there; several times, each in a new folder. Writes the figures into docs/quickstart.md:
`python tools/first_rollout.py [TIMES]`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from marks import write_part

from rloo_pipeline.demo import arithmetic
from rloo_pipeline.demo.character_model import tiny_qwen3

QUESTIONS = 200
INIT = "rloo init sums --model model --data sums.jsonl"
ENTER, RUN = "cd sums", "rloo run"
ROLLOUT = "results/sums/rounds/00001/rollouts/000.parquet"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "quickstart.md"
PATIENCE = 600.0
"""Seconds."""
TIMES = 3


class Durations(NamedTuple):
    """Seconds of one try."""

    init: float
    run: float
    """From the call of `rloo run` until the first rollout is written."""


def measure(folder: Path) -> Durations:
    """Types the commands in this folder.

    Raises:
        RuntimeError: the run ended, or the time is over, before the first rollout was written.
    """
    tiny_qwen3(folder / "model", 1)
    rows = arithmetic.problems("train", QUESTIONS)
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    began = time.monotonic()
    subprocess.run(INIT, shell=True, cwd=folder, env=environment, check=True)
    init_end = time.monotonic()
    run = subprocess.Popen(RUN, shell=True, cwd=folder / "sums", env=environment, start_new_session=True)
    try:
        while not (folder / "sums" / ROLLOUT).exists():
            if run.poll() is not None or time.monotonic() > init_end + PATIENCE:
                raise RuntimeError("there is no rollout")
            time.sleep(0.1)
        sampled = time.monotonic()
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGINT)
            run.wait()
    return Durations(init_end - began, sampled - init_end)


def sentence(measured: Sequence[Durations]) -> str:
    """The figures in words."""
    keys = sum(len(line) + 1 for line in (INIT, ENTER, RUN))
    totals = sorted(sum(one) for one in measured)
    return (
        f"With a small model and {QUESTIONS} questions, the first rollout is written {median(totals):.0f} s after you "
        f"start `rloo init` ({totals[0]:.0f} to\n{totals[-1]:.0f} s in {len(totals)} tries on {os.cpu_count()} CPU "
        f"cores; `rloo init` itself takes {median(one.init for one in measured):.1f} s). You type {keys} characters.\n"
        "`python tools/first_rollout.py` measures it.\n"
    )


if __name__ == "__main__":
    measured = []
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else TIMES):
        with tempfile.TemporaryDirectory() as temporary:
            measured.append(measure(Path(temporary)))
    text = sentence(measured)
    write_part(PAGE, "first rollout", text)
    print(text, end="")
