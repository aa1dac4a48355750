"""Policies that go through a node's own disk: the bytes of a run, what a lost disk costs it, what is left behind."""

import os
import sys
from pathlib import Path

import pytest
from helpers import AFTER_FIRST_TABLES, Project, executable

pytestmark = pytest.mark.slow

# Before the second rollout of the rounds 2 and 3, once for each: notes which policies have their weights on the node,
# removes them, and kills Snakemake.
KILLER = """
import os, shutil, signal, sys
from pathlib import Path

number = dict(zip(sys.argv, sys.argv[1:])).get("--round")
mark, shards = Path({marks!r}) / str(number), Path(f"results/mini/rounds/{{number}}/rollouts").glob("*.parquet")
if sys.argv[1] == "rollout" and number in ("00002", "00003") and any(shards) and not mark.exists():
    files = Path("results/mini/policies").glob("*/*.safetensors")
    mark.write_text(" ".join(file.parent.name for file in files if file.is_symlink()))
    shutil.rmtree(os.environ["RLOO_EXCHANGE"])
    if mark.name == "00003":
        shutil.rmtree("results/mini/trainer")
    os.kill(int(os.environ["RLOO_CONTROLLER"].split()[0]), signal.SIGKILL)
"""
TARGET = ("--cores", "1", "--", "results/mini/policies/00004")
ROUNDS = {"rounds": 4, "keep_every": 3}


def times(project: Project) -> dict[Path, float]:
    """The times of tables, metrics and kept policies."""
    run = project.folder / "results" / "mini"
    files = [*run.glob("rounds/**/*.*"), *run.glob("policies/0000[034]/*.*")]
    return {file.relative_to(run): file.stat().st_mtime for file in files}


@pytest.mark.long
def test_a_run_whose_node_is_lost_twice_has_the_bytes_of_one_without_exchange(finished, tmp_path) -> None:
    """The second time its trainer states are lost too, so rounds 1 and 2 are trained again from their tables."""
    plain, project = (Project(tmp_path / name).take(finished, *AFTER_FIRST_TABLES) for name in ("plain", "project"))
    outcome = plain.snakemake(*TARGET, **ROUNDS)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    marks, node, shim = (tmp_path / name for name in ("marks", "node", "shim"))
    marks.mkdir()
    node.mkdir()
    program = tmp_path / "killer.py"
    program.write_text(KILLER.format(marks=str(marks)))
    executable(shim, "rloo", f'python {program} "$@"\nexec python -m rloo_pipeline "$@"')
    project.environment["PATH"] = os.pathsep.join([str(shim), str(Path(sys.executable).parent), os.environ["PATH"]])
    before: dict[Path, float] = {}
    for number in (2, 3):
        outcome = project.snakemake(*TARGET, **ROUNDS, exchange=str(node))
        assert outcome.returncode != 0
        assert (marks / f"{number:05d}").read_text() == f"{number - 1:05d}"
        assert before.items() <= times(project).items(), "nothing that is kept is made anew"
        before = times(project)
        assert sum(file.match(f"rounds/{number:05d}/rollouts/*") for file in before) == 1
    left = project.folder / "results" / "mini" / "policies" / ".00001.0123abcd.tmp"
    left.mkdir()  # as by a rank on another node that outlived the removal of its folder
    outcome = project.snakemake(*TARGET, **ROUNDS, exchange=str(node))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert not left.exists()
    assert before.items() <= times(project).items()
    log = (project.folder / "results/mini/logs/restore/00002.log").read_text()
    assert all(f"round {number} is trained again" in log for number in (1, 2))
    for pattern in ("policies/*/*", "rounds/**/*"):
        assert project.files(pattern) == plain.files(pattern) != {}
    policies = sorted((project.folder / "results/mini/policies").glob("0*"))
    assert [policy.name for policy in policies] == ["00000", "00003", "00004"]
    assert list(node.iterdir()) == []
