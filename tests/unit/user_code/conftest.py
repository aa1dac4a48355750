"""An environment in a file."""

from pathlib import Path

import pytest
from rooms import ROOM


@pytest.fixture(scope="module")
def environment_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    (folder / "mine.py").write_text(ROOM)
    (folder / "neighbour.py").write_text('NAME = "a room"\n')
    (folder / "secret.py").write_text("hush = 1\n")
    return folder / "mine.py"
