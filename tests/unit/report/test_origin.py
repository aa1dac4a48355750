"""The page names the image with its digest, and the commit even if the image has no git."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import Project
from synthetic_runs import configuration, make_run, page_words

from rloo_pipeline.cli.main import main
from rloo_pipeline.report import origin
from rloo_pipeline.runtime import installation
from rloo_pipeline.version import __version__, with_commit


def page_text(run: Path) -> str:
    config = configuration(rounds=1).only("report")
    make_run(run, config)
    return page_words(run, config)


def test_the_page_names_the_image_and_its_digest(tmp_path, monkeypatch) -> None:
    image = tmp_path / "rloo-cpu-0.1.0-0123456789ab.sif"
    image.write_bytes(b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0" + bytes(range(256)) * 5000)
    monkeypatch.setenv("APPTAINER_CONTAINER", str(image))
    text = page_text(tmp_path / "a")
    assert f"{image.name} SHA-256 {hashlib.sha256(image.read_bytes()).hexdigest()}" in text
    assert "rloo run results/synthetic/config.yaml run=again --sdm apptainer" in text
    monkeypatch.setenv("APPTAINER_CONTAINER", str(tmp_path / "gone.sif"))
    text = page_text(tmp_path / "b")
    assert "gone.sif" in text, "the name alone if the file cannot be read from inside"
    assert "gone.sif SHA-256" not in text
    monkeypatch.delenv("APPTAINER_CONTAINER")
    assert "none: the stages ran in the local environment" in page_text(tmp_path / "c")


@pytest.mark.parametrize(("commit", "differs"), [("c0ffee", False), ("c0ffee changed", True)])
def test_the_commit_comes_from_the_controller(commit, differs, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(origin.COMMIT, commit)
    clone = tmp_path if differs else tmp_path / "elsewhere"
    monkeypatch.setattr(installation, "clone", lambda: clone)
    text = page_text(tmp_path / "run")
    checkout = "git checkout c0ffee" if differs else "git -C path/to/rloo_pipeline checkout c0ffee"
    assert f"{checkout} && rloo run results/synthetic/config.yaml" in text
    assert ("Sources differed from that commit" in text) == differs


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x.invalid", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_controller_passes_on_the_commit_and_the_version_of_its_sources(tmp_path) -> None:
    project = Project(tmp_path / "project")
    git(project.folder, "init", "-q")
    code = (
        "import os; from rloo_pipeline.report import origin; origin.note_commit(); "
        "print(os.environ[origin.COMMIT], origin.versions()['rloo_pipeline'], sep='; ')"
    )

    environment = {name: value for name, value in project.environment.items() if name != origin.COMMIT}

    def noted() -> str:
        command = [sys.executable, "-c", code]
        outcome = subprocess.run(
            command, cwd=project.folder, env=environment, check=True, capture_output=True, text=True
        )
        return outcome.stdout.strip()

    assert noted() == f"; {__version__}"
    (project.folder / ".git/info/exclude").write_text("__pycache__\n")
    git(project.folder, "add", "--all")
    git(project.folder, "commit", "-qm", "code")
    of_code = git(project.folder, "rev-parse", "HEAD")
    version = f"{__version__}+g{of_code[:12]}"
    assert noted() == f"{of_code}; {version}"
    own = project.folder / "my-run.yaml"
    own.write_text("rounds: 2\n")
    git(project.folder, "add", own.name)
    git(project.folder, "commit", "-qm", "a configuration makes no new version")
    head = git(project.folder, "rev-parse", "HEAD")
    assert head != of_code
    assert noted() == f"{head}; {version}"
    own.write_text("rounds: 3\n")
    assert noted() == f"{head} changed; {version}"
    (project.folder / "Snakefile").write_text("# another\n")
    assert noted() == f"{head} changed; {version}.changed"
    git(project.folder, "checkout", "-q", "Snakefile")
    (project.folder / "rloo_pipeline" / "own.py").write_text("")
    assert noted() == f"{head} changed; {version}.changed"


def test_a_command_that_snakemake_has_not_started_notes_the_version_too(tmp_path, monkeypatch, capsys) -> None:
    for name in (origin.COMMIT, origin.VERSION):
        monkeypatch.setenv(name, "")  # so that the old value returns
        monkeypatch.delenv(name)
    monkeypatch.setattr(origin, "_git", lambda *arguments: "" if arguments[0] == "status" else "0123456789abcdef")
    with pytest.raises(SystemExit):
        main(["rescore", str(tmp_path / "none"), "--rewards", "rewards.yaml", "--out", str(tmp_path / "out")])
    assert "none" in capsys.readouterr().err
    assert with_commit() == f"{__version__}+g0123456789ab"
