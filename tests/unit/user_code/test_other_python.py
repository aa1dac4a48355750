"""Environments run with the Python of another virtual environment, with its packages and none of ours."""

import json
import time
import venv
from pathlib import Path

import pytest
from rooms import answers, begun, finished

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code import confinement
from rloo_pipeline.user_code.confinement import Confinement
from rloo_pipeline.user_code.pool import EnvironmentPool

ROOM = '''
import openai
class Room:
    """A room."""
    def reset(self, **row):
        self.version = openai.VERSION
        return "a room"
    def has(self, module: str) -> str:
        """Imports a module.

        Args:
            module: its name.
        """
        try:
            return str(__import__(module).__file__)
        except ImportError as error:
            return type(error).__name__
    def get_reward(self):
        return 1.0
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """A virtual environment with an openai that the one of the tests does not have."""
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "openai.py").write_text("VERSION = 'another'\n")
    return folder / "bin" / "python"


@pytest.fixture
def room(tmp_path) -> str:
    (tmp_path / "room.py").write_text(ROOM)
    return f"{tmp_path / 'room.py'}:Room"


def test_an_environment_sees_the_packages_of_its_python_and_none_of_ours(python, room) -> None:
    with EnvironmentPool(room, [], 2, 20.0, Confinement(python=str(python))) as pool:
        [schema] = pool.schemas({})
        assert schema["function"]["name"] == "has"
        assert begun(pool, 1)[0].texts == ("a room",)
        pool.call(1, [("has", {"module": name}) for name in ("openai", "torch", "numpy")])
        [answer] = answers(pool)
        [own] = python.parents[1].glob("lib/*/site-packages/openai.py")
        assert answer.texts == (str(own), "ModuleNotFoundError", "ModuleNotFoundError")
        [end] = finished(pool, 1)
        assert (end.reward, json.loads(end.state or "")["version"]) == (1.0, "another")


def test_a_python_that_is_none_or_lacks_a_package_is_a_sentence(python, room, tmp_path) -> None:
    with (
        pytest.raises(UserError, match=r"^rollout.environment_python: .*/none is not a program; name bin/python of"),
        EnvironmentPool(room, [], 2, 20.0, Confinement(python=str(tmp_path / "none"))),
    ):
        pass
    (tmp_path / "room.py").write_text("import torch\nclass Room:\n    def reset(self, **row): pass\n")
    message = r"No module named 'torch' .*; it can use the packages of /.*bin/python"
    with (
        EnvironmentPool(room, [], 2, 20.0, Confinement(python=str(python))) as pool,
        pytest.raises(UserError, match=message),
    ):
        pool.check()


def test_a_python_that_ends_before_it_is_told_anything_is_a_sentence(room, monkeypatch) -> None:
    monkeypatch.setattr(confinement, "read_only_paths", lambda _: time.sleep(0.5) or [])
    with (
        pytest.raises(UserError, match=r"the process that imports .* ended its process with exit code 1"),
        EnvironmentPool(room, [], 2, 20.0, Confinement(python="/bin/false")) as pool,
    ):
        pool.check()
