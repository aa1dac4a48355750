"""The sandbox of this machine, and an environment in a file."""

from pathlib import Path

import pytest
from helpers import require_sandbox
from rooms import ROOM

from rloo_pipeline.user_code.sandbox.command_line import Sandbox


@pytest.fixture(scope="module")
def machine_sandbox() -> Sandbox:
    return require_sandbox()


@pytest.fixture(scope="module")
def environment_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    (folder / "mine.py").write_text(ROOM)
    (folder / "neighbour.py").write_text('NAME = "a room"\n')
    (folder / "secret.py").write_text("hush = 1\n")
    return folder / "mine.py"
