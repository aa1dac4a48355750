"""Workers keep engines alive between rounds: the same bytes as without them, and as with workers that die."""

import re
import subprocess
import sys
import time
from collections import Counter

import forks
import psutil
import pytest
from helpers import AFTER_SFT, Project

pytestmark = pytest.mark.slow

EVERYTHING = ("warmstart/**/*", "policies/*/*", "rounds/**/*", "trainer/**/*", "evaluation/**/*", "tensorboard/*")


def same(project: Project, finished: Project) -> None:
    for pattern in EVERYTHING:
        found = finished.files(pattern)
        assert found
        assert project.files(pattern) == found


def said(project: Project) -> list[str]:
    """What the workers said."""
    logs = (project.folder / "results" / "mini" / "logs" / "workers").glob("*.log")
    return [line for log in logs for line in log.read_text().splitlines()]


def served(project: Project) -> list[str]:
    """The stages that workers ran."""
    return sorted(line.split()[1] for line in said(project) if line.startswith("rloo ") and line.endswith(": 0"))


def test_a_stage_by_itself_gives_the_bytes_that_a_worker_gave(tmp_path, finished) -> None:
    """The commands that Snakemake prints, in a copy of the run from which the second round was taken."""
    second = ("rounds/00002", "policies/00002", "trainer/00002", "tensorboard/00002*")
    project = Project(tmp_path / "project").take(finished, *second, "evaluation/final", "*.json", "*.html")
    said = project.snakemake("--dry-run").stdout
    commands = {words[1]: words[1:] for words in map(str.split, re.findall(r"rloo .*/00002.*", said))}
    for stage in ("rollout", "score", "reference"):
        for shard in ("000", "001"):
            run_in(project, [re.sub(r"/\d{3}\.", f"/{shard}.", word) for word in commands[stage]])
    run_in(project, commands["update"])
    for pattern in ("rounds/00002/*/*", "policies/00002/*", "trainer/00002/**/*", "tensorboard/00002*"):
        assert project.files(pattern) == finished.files(pattern) != {}


def run_in(project: Project, words: list[str]) -> None:
    outcome = forks.run("rloo_pipeline", words, project.environment, project.folder)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.long
def test_a_run_without_workers_gives_the_same_bytes(tmp_path, finished) -> None:
    times = {"rollout": 4, "score": 4, "reference": 4, "update": 2, "gate": 1, "evaluate": 2, "distance": 1}
    times |= {"probe": 1, "checks": 1}
    assert Counter(served(finished)) >= Counter(times), "every stage that a worker can do was done by one"
    project = Project(tmp_path / "project").take(finished, *AFTER_SFT)
    outcome = project.snakemake("--cores", "2", workers="never")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert served(project) == []
    same(project, finished)


@pytest.mark.long
def test_workers_that_die_make_a_run_slower_and_no_different(tmp_path, finished) -> None:
    """They die in the second round, whose update then begins with the trainer state on the disk."""
    project = Project(tmp_path / "project").take(finished, *AFTER_SFT)
    project.environment["TMPDIR"] = str(tmp_path)
    project.configure()
    command = [sys.executable, "-m", "snakemake", "--configfile", "config/test.yaml", "--cores", "2"]
    with subprocess.Popen(
        command,
        cwd=project.folder,
        env=project.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        while run.poll() is None and not (project.folder / "results/mini/rounds/00002/rollouts").is_dir():
            time.sleep(0.1)
        workers = [child for child in psutil.Process(run.pid).children() if "worker" in child.cmdline()]
        assert len(workers) == 7
        for worker in workers:
            worker.kill()
        said, _ = run.communicate(timeout=600)
    assert run.returncode == 0, said
    assert len(served(project)) < len(served(finished))
    same(project, finished)


def test_workers_end_with_their_snakemake(finished) -> None:
    mine = str(finished.folder)
    alive = [p for p in psutil.process_iter(["cmdline", "cwd"]) if "worker" in (p.info["cmdline"] or [])]
    assert not [process for process in alive if process.info["cwd"] == mine]
