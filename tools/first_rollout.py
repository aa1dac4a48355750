"""Measures what stands between a model with 200 questions and their first rollout: seconds, and keys to press.

Makes a small model and a file of questions, calls `rloo init` and `rloo run` as a user would type them, and ends the
run when the first rollout is there: `python tools/first_rollout.py`. The figures go into docs/quickstart.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rloo_pipeline.demo import arithmetic
from rloo_pipeline.demo.character_model import tiny_qwen3

QUESTIONS = 200
INIT = "rloo init sums --model model --data sums.jsonl"
ENTER, RUN = "cd sums", "rloo run"
ROLLOUT = "results/sums/rounds/00001/rollouts/000.parquet"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "quickstart.md"
BEGIN, END = "<!-- first rollout -->\n", "<!-- /first rollout -->\n"
PATIENCE = 600.0
"""Seconds."""


def measure(folder: Path) -> str:
    """Types the commands in this folder. Returns the figures in words.

    Raises:
        RuntimeError: the run ended, or the time is over, before there was a rollout.
    """
    tiny_qwen3(folder / "model", 1)
    rows = arithmetic.problems("train", QUESTIONS)
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    began = time.monotonic()
    subprocess.run(INIT, shell=True, cwd=folder, env=environment, check=True)
    made = time.monotonic()
    run = subprocess.Popen(RUN, shell=True, cwd=folder / "sums", env=environment, start_new_session=True)
    try:
        while not (folder / "sums" / ROLLOUT).exists():
            if run.poll() is not None or time.monotonic() > made + PATIENCE:
                raise RuntimeError("there is no rollout")
            time.sleep(0.1)
        sampled = time.monotonic()
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGINT)
            run.wait()
    keys = sum(len(line) + 1 for line in (INIT, ENTER, RUN))
    return (
        f"{sampled - began:.0f} s and {keys} keystrokes to the first rollout: {made - began:.1f} s for rloo init, "
        f"{sampled - made:.0f} s for rloo run ({os.cpu_count()} cores)"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        figures = measure(Path(temporary))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    text = "`python tools/first_rollout.py` types these commands for a small model and 200 questions. The last time:\n"
    text += f"{figures}.\n"
    PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])
    print(figures)
