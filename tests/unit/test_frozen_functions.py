"""The copies of the user's functions that a run imports in place of the files."""

import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers import mini
from setuptools.command import editable_wheel

from rloo_pipeline import frozen_functions, import_string
from rloo_pipeline.artifacts import function_copies
from rloo_pipeline.config import provenance, syntax
from rloo_pipeline.config.loading import validate
from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code import worker
from rloo_pipeline.user_code.messages import Start

FUNCTION = "from {helper} import ONE\n\ndef reward(completions):\n    return [ONE / len(completions)]\n"


@pytest.fixture(autouse=True)
def _no_copies_stay_in_use(monkeypatch, tmp_path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    frozen_functions.use(None)
    del os.environ[frozen_functions.VARIABLE]
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def freeze(function: str) -> Path:
    """Copies the files of a reward for a run."""
    folder = function_copies.folder_of(Path("results/mini"))
    changes = {"rewards": [{"function": function, "name": "answer"}]}
    function_copies.write(folder, [validate(mini(**changes), "test")])
    return folder


def forget() -> None:
    cached = (syntax.facts, provenance._digest, provenance._closure, provenance._imports)
    for function in (*cached, frozen_functions.shared_projects):
        function.cache_clear()


@pytest.mark.parametrize(
    ("function", "helper"),
    [
        ("mine.py:reward", "beside"),
        ("mine/rewards.py:reward", "mine.beside"),
        ("mine_pkg.rewards:reward", ".beside"),
        ("mine_pkg.rewards:reward", "mine_pkg"),
    ],
)
@pytest.mark.parametrize("gone", [False, True])
def test_a_function_and_what_it_imports_are_those_that_the_run_began_with(tmp_path, function, helper, gone) -> None:
    file = tmp_path / (function.partition(":")[0].removesuffix(".py").replace(".", "/") + ".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(FUNCTION.format(helper=helper))
    beside = file.parent / ("__init__.py" if helper == "mine_pkg" else "beside.py")
    (file.parent / "__init__.py").write_text("")
    beside.write_text("ONE = 1.0\n")
    forget()
    folder = freeze(function)
    before = provenance.function_files(function)
    for edited in (file, beside):
        edited.unlink() if gone else edited.write_text("ONE = 2.0\n\ndef reward(completions):\n    return [2.0]\n")
    forget()
    frozen_functions.use(folder)
    loaded = import_string.load(function)
    assert loaded([1, 2]) == [0.5]
    assert Path(sys.modules[loaded.__module__].__file__).resolve() == file
    assert provenance.function_files(function) == before
    with pytest.raises(ZeroDivisionError) as raised:
        loaded([])
    assert "return [ONE / len(completions)]" in "".join(traceback.format_exception(raised.value))
    if not gone:
        frozen_functions.use(None)
        assert import_string.load(function)([1, 2]) == [2.0]


def test_a_file_that_is_imported_from_a_folder_of_pythonpath_is_copied(tmp_path, monkeypatch) -> None:
    (tmp_path / "src").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "src")
    (tmp_path / "src" / "apart.py").write_text("import torch, transformers, installed\nONE = 1.0\n")
    (tmp_path / "mine.py").write_text(FUNCTION.format(helper="apart"))
    (tmp_path / "deps" / "installed").mkdir(parents=True)
    (tmp_path / "deps" / "installed" / "__init__.py").touch()
    (tmp_path / "deps" / "installed-1.dist-info").mkdir()
    (tmp_path / "deps" / "installed-1.dist-info" / "RECORD").write_text("installed/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path / "deps")
    forget()
    folder = freeze("mine.py:reward")
    assert {file.name for file in folder.rglob("*.py")} == {"mine.py", "apart.py"}, "none of a package"
    (tmp_path / "src" / "apart.py").write_text("ONE = 2.0\n")
    frozen_functions.use(folder)
    assert import_string.load("mine.py:reward")([1, 2]) == [0.5]


def test_a_module_that_pip_installed_for_editing_is_that_with_which_the_run_began(tmp_path, monkeypatch) -> None:
    """Its finder stands after that for files."""
    file = tmp_path / "sources" / "installed.py"
    file.parent.mkdir()
    file.write_text("def reward(completions):\n    return [1.0]\n")
    finder = SimpleNamespace(
        find_spec=lambda name, *_: spec_from_file_location(name, file) if name == "installed" else None
    )
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    forget()
    folder = freeze("installed:reward")
    file.write_text("def reward(completions):\n    return [2.0]\n")
    frozen_functions.use(folder)
    assert import_string.load("installed:reward")([1]) == [1.0]


@pytest.mark.parametrize("project", [".", "project"], ids=["in the project", "outside"])
def test_what_a_function_imports_of_a_package_that_pip_installed_for_editing_is_copied(
    tmp_path, monkeypatch, project
) -> None:
    """Setuptools' finder, where the folder has another name than the package."""
    package = tmp_path / "libs" / "sources"
    (tmp_path / project).mkdir(exist_ok=True)
    monkeypatch.chdir(project)
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "deep" / "__init__.py").touch()
    apart = package / "deep" / "apart.py"
    apart.write_text("ONE = 1.0\n")
    Path("mine.py").write_text(FUNCTION.format(helper="for_editing.deep.apart"))
    made: dict[str, Any] = {}
    exec(editable_wheel._finder_template("for_editing", {"for_editing": str(package)}, {}), made)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, made["_EditableFinder"]])
    forget()
    with monkeypatch.context() as environment:
        environment.setattr(sys, "prefix", str(tmp_path / "libs"))
        assert {file.name for file in provenance.function_files("mine.py:reward")} == {"mine.py"}
    forget()
    folder = freeze("mine.py:reward")
    assert {file.name for file in folder.rglob("*.py")} == {"mine.py", "__init__.py", "apart.py"}
    before = provenance.function_files("mine.py:reward")
    apart.write_text("ONE = 2.0\n")
    frozen_functions.use(folder)
    assert import_string.load("mine.py:reward")([1, 2]) == [0.5]
    frozen_functions.use(None)
    forget()
    assert provenance.function_files("mine.py:reward") != before


@pytest.mark.parametrize("by", ["pip install -e", "PYTHONPATH"])
def test_a_package_outside_the_project_that_python_finds_by_a_path_is_copied(tmp_path, monkeypatch, by) -> None:
    """For `pip install -e`, as hatchling, uv and setuptools record a `src` layout."""
    package, record = tmp_path / "my lib" / "src" / "by_path", tmp_path / "site" / "by_path-1.dist-info"
    for folder in (package, record, tmp_path / "project"):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("ONE = 1.0\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if by == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
    else:
        (record / "METADATA").write_text("Name: by_path\nVersion: 1\n")
        origin = {"url": (tmp_path / "my lib").as_uri(), "dir_info": {"editable": True}}
        (record / "direct_url.json").write_text(json.dumps(origin))
        monkeypatch.syspath_prepend(record.parent)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.chdir("project")
    Path("mine.py").write_text(FUNCTION.format(helper="by_path"))
    forget()
    folder = freeze("mine.py:reward")
    assert {file.name for file in folder.rglob("*.py")} == {"mine.py", "__init__.py"}
    (package / "__init__.py").write_text("ONE = 2.0\n")
    frozen_functions.use(folder)
    assert import_string.load("mine.py:reward")([1, 2]) == [0.5]


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.path.insert(0, 'library')\nfrom apart import ONE",
        "import importlib, sys\nsys.path.append('library')\nONE = importlib.import_module('apart').ONE",
    ],
)
def test_a_file_of_the_project_that_cannot_be_copied_is_refused(text, tmp_path, monkeypatch) -> None:
    """An edit of it would change scores in the middle of a run."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "apart.py").write_text("ONE = 1.0\n")
    (tmp_path / "mine.py").write_text(f"{text}\ndef reward(completions):\n    return [ONE]\n")
    forget()
    folder = freeze("mine.py:reward")
    assert import_string.load("mine.py:reward")([1]) == [1.0], "outside of runs"
    for name in ("apart", *(name for name in sys.modules if name.startswith("rloo_user_mine"))):
        del sys.modules[name]
    frozen_functions.use(folder)
    with pytest.raises(UserError, match=r"^mine\.py: the run has no copy of .*library/apart\.py, which"):
        import_string.load("mine.py:reward")
    (tmp_path / "library" / "apart-1.dist-info").mkdir()
    del sys.modules["apart"]
    assert import_string.load("mine.py:reward")([1]) == [1.0], "packages that pip put there are not copied"


def test_a_copy_that_was_edited_is_refused(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def reward(completions):\n    return [1.0]\n")
    forget()
    folder = freeze("mine.py:reward")
    written = (folder / "functions.json").stat().st_mtime_ns
    freeze("mine.py:reward")
    assert (folder / "functions.json").stat().st_mtime_ns == written
    function_copies.use(folder.parent / "rounds")
    (folder / "mine.py").write_text("def reward(completions):\n    return [2.0]\n")
    frozen_functions.use(None)
    with pytest.raises(
        UserError, match=r"functions/mine\.py was changed or removed since the run began; put it back, or"
    ):
        function_copies.use(folder.parent)


def test_a_file_that_cannot_be_looked_at_does_not_exist() -> None:
    assert not frozen_functions.exists(Path("f" * 300))


def test_functions_of_this_package_and_of_libraries_are_not_copied() -> None:
    for function in ("rloo_pipeline.rewards.answer:exact_answer_reward", "trl.rewards:accuracy_reward"):
        assert not freeze(function).exists()


def test_copies_that_a_kill_left_between_two_renames_are_put_back(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION.format(helper="beside"))
    (tmp_path / "beside.py").write_text("ONE = 1\n")
    folder = freeze("mine.py:reward")
    for name, whole in ((".functions.1.tmp", False), (".functions.2.tmp", True)):
        left = folder.rename(folder.with_name(name)) if whole else folder.with_name(name)
        left.mkdir(exist_ok=True)
    function_copies.restore(folder)
    function_copies.verify(folder)
    (folder.with_name(".functions.3.tmp")).mkdir()
    function_copies.restore(folder)
    function_copies.verify(folder)


@pytest.mark.parametrize("unreadable", ["functions.json", "mine.py"])
def test_a_worker_names_a_copy_that_it_cannot_read_and_says_why(tmp_path, monkeypatch, unreadable) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION.format(helper="math").replace("ONE", "pi"))
    frozen_functions.use(folder := freeze("mine.py:reward"))
    frozen_functions.use(None)
    read = Path.open

    def fail(path: Path, *arguments: object, **options: object) -> object:
        if path == folder / unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setenv(frozen_functions.VARIABLE, str(folder))
    messages = []
    worker._serve(SimpleNamespace(send=messages.extend), None, Start("mine.py:reward", {}, os.getpid()))
    assert re.search(f"Input/output error.*{unreadable}|{unreadable}: the file system failed", messages[0].message)


def test_what_is_no_source_of_the_project_needs_no_copy(tmp_path, monkeypatch) -> None:
    """Modules of the Hub's libraries, of a zip, and those whose name in sys.modules is an alias with more dots."""
    monkeypatch.chdir(tmp_path)
    own, other = tmp_path / "mine.py", tmp_path / "hf" / "modules" / "evaluate_modules" / "rouge.py"
    other.parent.mkdir(parents=True)
    for file in (own, other):
        file.write_text("ONE = 1\n")
    monkeypatch.setattr(frozen_functions, "in_use", lambda: SimpleNamespace(by_file={own: own}))

    def module(file: Path) -> ModuleType:
        made = ModuleType("made")
        made.__file__ = str(file)
        return made

    with pytest.raises(UserError, match=r"the run has no copy of .*rouge\.py"):
        frozen_functions.require_copies(own, {".".join("alias" * 20): module(other)})
    frozen_functions.require_copies(own, {"zipped": module(tmp_path / "z.zip" / "zipped.py")})
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    frozen_functions.require_copies(own, {"rouge": module(other)})
