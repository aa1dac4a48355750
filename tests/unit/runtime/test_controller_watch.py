"""A stage ends with the Snakemake that started it, and only with that one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helpers import mini, wait_until

from rloo_pipeline.runtime import controller_watch


@pytest.fixture
def controller() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def start(folder: Path, variable: str) -> subprocess.Popen:
    """A command with a log that goes on until it is ended; returns it when it is at work."""
    (folder / "config.yaml").write_text(yaml.safe_dump(mini()))
    command = [sys.executable, "-m", "rloo_pipeline", "watch", folder, "--every", "0.1", "--log", folder / "log"]
    process = subprocess.Popen(command, env=os.environ | {controller_watch.VARIABLE: variable})
    wait_until((folder / "log").exists)
    return process


def test_a_stage_ends_when_its_snakemake_is_killed(tmp_path, controller) -> None:
    process = start(tmp_path, controller_watch.name().replace(str(os.getpid()), str(controller.pid), 1))
    assert process.poll() is None
    controller.kill()
    controller.wait()
    assert process.wait(timeout=60) == 1


def test_a_process_of_another_machine_or_container_is_not_watched(tmp_path, controller) -> None:
    process = start(tmp_path, f"{controller.pid} another-boot pid:[1]")
    controller.kill()
    controller.wait()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.kill()
    process.wait()
