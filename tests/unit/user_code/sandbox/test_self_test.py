"""Programs have what they need of the system; a sandbox that lacks it is an error, not a score of 0."""

import ast
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from programs import ADD, IMAGE, LIMITS

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards import code
from rloo_pipeline.rewards.code import code_reward
from rloo_pipeline.user_code.reward_call import collect_notes
from rloo_pipeline.user_code.sandbox import inside, self_test

TESTS = ["assert add(1, 2) == 3"]


@pytest.mark.skipif(not Path("/usr/share/zoneinfo/Europe/Paris").exists(), reason="no time zones on this machine")
def test_time_zones_can_be_read(run_confined):
    assert run_confined("import zoneinfo\nprint(zoneinfo.ZoneInfo('Europe/Paris'))") == "Europe/Paris\n"


@pytest.mark.skipif(bool(IMAGE), reason="an image has a Python of its own")
def test_numpy_can_be_imported_from_read_only(confinement):
    program = "import numpy\ndef f(): return int(numpy.arange(3).sum())"
    folder = sysconfig.get_path("platlib")
    assert Path(np.__file__).is_relative_to(folder)
    assert code_reward([program], tests=["assert f() == 3"], read_only=[folder]) == [1]


def test_code_that_runs_in_images_has_no_annotation_that_python_3_9_cannot_evaluate():
    for file in Path(inside.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        if "annotations" not in [alias.name for node in tree.body[:3] for alias in getattr(node, "names", [])]:
            notes = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
            parts = [part for note in notes if note is not None for part in ast.walk(note)]
            assert not [part for part in parts if isinstance(part, ast.BinOp)], file


@pytest.fixture(autouse=True)
def forget():
    self_test.self_test.cache_clear()
    yield
    self_test.self_test.cache_clear()


def test_a_module_that_only_the_sandbox_lacks_is_an_error(confinement, monkeypatch):
    monkeypatch.setattr(self_test, "MODULES", ("zlib", "yaml"))
    with pytest.raises(UserError, match=r"the sandbox \(\w+\) cannot import yaml .*readable for everybody"):
        code_reward([ADD], tests=TESTS, image=IMAGE)
    monkeypatch.setattr(self_test, "MODULES", ("zlib", "no_such_module"))
    assert code_reward([ADD], tests=TESTS, image=IMAGE) == [1], "nor has this Python no_such_module"


def test_a_path_that_programs_cannot_read_is_an_error(confinement, tmp_path):
    tmp_path.chmod(0)
    with pytest.raises(UserError, match=rf"cannot read {tmp_path} .*Permission denied"):
        code_reward([ADD], tests=TESTS, image=IMAGE, read_only=[str(tmp_path)])


@pytest.mark.parametrize("memory_mb", [8, 20])
def test_too_little_memory_for_any_program_is_an_error(confinement, memory_mb):
    with pytest.raises(UserError, match="memory_mb"):
        code_reward([ADD], tests=TESTS, image=IMAGE, memory_mb=memory_mb)


@pytest.mark.parametrize(
    ("name", "value", "fault"), [("RIGHT", "def f(x): return x", "fails a right"), ("WRONG", ADD, "passes a wrong")]
)
def test_a_sandbox_that_grades_wrong_is_an_error(confinement, monkeypatch, name, value, fault):
    monkeypatch.setattr(self_test, name, value.replace("add(a, b)", "f(a, b=1)"))
    with pytest.raises(UserError, match=fault):
        self_test.self_test(confinement, LIMITS)


@pytest.mark.parametrize(
    ("started", "whose"), [("no_module", "the sandbox"), ("inside.examiner", "the sandbox of the program")]
)
def test_a_sandbox_that_does_not_start_any_more_is_no_score(confinement, monkeypatch, tmp_path, started, whose):
    """As where the machine has no more processes or memory for it."""
    command = tmp_path / "command"
    command.write_text(f'#!/bin/sh\ncase "$*" in *{started}*) exec {confinement.command} "$@" ;; esac\nexit 1\n')
    command.chmod(0o755)
    monkeypatch.setattr(code.sandbox, "find", lambda *_: confinement._replace(command=str(command)))
    monkeypatch.setattr(code, "self_test", lambda *_: None)
    notes = collect_notes()
    assert code_reward([ADD], tests=[TESTS]) == [None]
    assert notes == {0: f"cannot run the tests: {whose} did not start"}
    if started == "no_module":
        assert code_reward([ADD], tests=[[{"input": "", "output": ""}]]) == [None]
