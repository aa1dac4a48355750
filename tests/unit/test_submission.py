"""`rloo submit`, `status` and `cancel` without SLURM; tests/cluster/test_submit.py has them with it."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import MINI, ROOT


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "Snakefile").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("submit", "--time=60"), "rloo submit: error: no srun on the PATH"),
        (("submit", "--time=60", "--sbatch=Partition gpu"), "write it as KEY=VALUE"),
        (("status", "mini"), "nothing was submitted from here; submit it with `rloo submit`"),
        (("cancel", "mini"), "nothing was submitted from here; submit it with `rloo submit`"),
    ],
)
def test_each_error_is_one_line(project, argv, message) -> None:
    config = (f"--config={MINI}",) if argv[0] == "submit" else ()
    outcome = subprocess.run(
        [sys.executable, "-m", "rloo_pipeline", *argv, *config],
        cwd=project,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "HOME": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 1
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr
