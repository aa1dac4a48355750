"""A wheel carries the workflow: installed alone, it runs from an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml
from helpers import MINI, PARTS, ROOT, mini

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources, which a build writes to."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for part in (*PARTS, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        source = ROOT / part
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, sources / part)
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=sources, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def rloo(wheel, tmp_path_factory) -> Path:
    """The command `rloo` of a fresh environment with the wheel; its dependencies are those of this environment."""
    venv = tmp_path_factory.mktemp("venv") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin" / "rloo"


def call(folder: Path, *argv: object, expected: int = 0, **changes: str) -> str:
    """What a command prints in a folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changes
    outcome = subprocess.run(
        list(map(str, argv)), cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert outcome.returncode == expected, outcome.stdout + outcome.stderr
    return outcome.stdout + outcome.stderr


def test_the_wheel_has_what_the_definitions_of_images_copy(wheel) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for kind in ("cpu", "cuda"):
        definition = (ROOT / "containers" / f"rloo-{kind}.def").read_text()
        copied = definition.partition("%files\n")[2].partition("\n\n")[0].splitlines()
        sources = [line.split()[0] for line in copied]
        assert len(sources) > 4
        for source in set(sources) - {"rloo_pipeline"}:
            assert f"rloo_pipeline/project/{source}" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests", "build"))]


def test_the_wheel_has_every_file_of_the_package_and_of_the_workflow(wheel) -> None:
    """So what a run from it uses is there."""
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, place in (("rloo_pipeline", "rloo_pipeline"), ("workflow", "rloo_pipeline/project/workflow")):
        files = [file.relative_to(ROOT / folder).as_posix() for file in (ROOT / folder).rglob("*") if file.is_file()]
        expected = {f"{place}/{file}" for file in files if "__pycache__" not in file}
        assert any(file.endswith(".j2") for file in expected) == (folder == "rloo_pipeline")
        assert expected - names == set()


def test_from_an_empty_folder_without_a_clone(rloo, tmp_path) -> None:
    where = call(tmp_path, rloo.parent / "python", "-m", "rloo_pipeline.runtime.installation").strip()
    assert Path(where).is_relative_to(rloo.parents[1]), "not the clone that the tests run from"
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.yaml").write_text(MINI.read_text())
    assert " jobs would run:\n  output missing: " in call(tmp_path, rloo, "run", "-n")
    assert " jobs would run:\n  output missing: " in call(tmp_path, rloo, "why", "--config", "run=other")
    assert "no run was submitted from this folder" in call(tmp_path, rloo, "status")
    assert "jobs: " in call(tmp_path, rloo, "plan")
    python = "import rloo_pipeline; rloo_pipeline.run('config/config.yaml', dry_run=True)"
    assert "report.html" in call(tmp_path, rloo.parent / "python", "-c", python)
    assert "no srun on the PATH" in call(tmp_path, rloo, "submit", "--time", "60", expected=1, PATH="")
    assert not (tmp_path / "results" / "mini" / "prompts").exists()


@pytest.mark.long
def test_a_run_of_a_wheel_in_a_project_of_its_own(rloo, tiny_model, tmp_path) -> None:
    """To the first scores, for which workflow, hooks, workers and engines of the wheel have done their part."""
    rows = "".join(f'{{"question": "{n}+{n}", "answer": "{2 * n}"}}\n' for n in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    call(tmp_path, rloo, "init", "project", "--model", tiny_model, "--data", "rows.jsonl")
    project = tmp_path / "project"
    config = yaml.safe_load((project / "config" / "config.yaml").read_text())
    (project / "config" / "config.yaml").write_text(yaml.safe_dump({**mini(), "run": config["run"]}))
    scores = "results/project/rounds/00001/scores/000.parquet"
    call(project, rloo, "run", "--cores", "1", "--", scores)
    assert (project / scores).exists()
    assert list((project / "results/project/logs/workers").iterdir()), "the start of the module started workers"
    assert "Nothing to be done" in call(project, rloo, "run", "--", scores)
