"""The output of a stage."""

import subprocess
import sys


def test_when_a_stage_in_a_worker_has_ended_nobody_has_its_terminal_open(tmp_path) -> None:
    """Otherwise srun waits a minute for the end of a step's output."""
    code = (
        "import os; from pathlib import Path; from rloo_pipeline.runtime import output, progress\n"
        "read, write = os.pipe()\n"
        "with output.standard_output_to(write):\n"
        "    output.route_output(Path('stage.log')); progress.say('a line')\n"
        "print(os.read(read, 100), os.read(read, 100))"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert outcome.stdout == "b'a line\\n' b''\n", outcome.stderr
