"""Workers keep engines alive between rounds: the bytes are the same as without workers, and with workers that die."""

import re
import time
from collections import Counter
from pathlib import Path

import forks
import psutil
import pytest
from helpers import AFTER_FIRST_TABLES, SECOND_ROUND, Project, wait_until

pytestmark = pytest.mark.slow

TABLES = {"rollout": "rollouts", "score": "scores", "reference": "reference"}
EVERYTHING = ("policies/*/*", "rounds/**/*", "trainer/00002/**/*", "tensorboard/*")


def served(project: Project) -> list[str]:
    """The stages that workers ran, by their logs."""
    logs = (project.folder / "results" / "mini" / "logs" / "workers").glob("*.log")
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return sorted(line.split()[1] for line in lines if line.startswith("rloo ") and line.endswith(": 0"))


def workers(folder: Path) -> list[psutil.Process]:
    """The living workers of a Snakemake in `folder`."""
    processes = [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(folder)]
    return [one for one in processes if "worker" in forks.words_of(one)]


def test_stages_by_themselves_give_the_bytes_that_workers_gave(tmp_path, finished) -> None:
    """Runs the commands that Snakemake prints, in a copy of the run without one shard of its second round."""
    again = ("rounds/00002/*/000.parquet", "policies/00002", "rounds/00002/*.*", "tensorboard/00002*")
    project = Project(tmp_path / "project").take(finished, *again)
    planned = project.snakemake("--dry-run", "--forceall", "--printshellcmds")
    commands = re.findall(r"rloo (\S+ .*)", planned.stdout + planned.stderr)
    for stage, output in (
        ("update", "policies/00001"),  # the state that it leaves is gone when a run is finished
        ("gate", "rounds/00001/diagnosis.json"),
        *((stage, f"/00002/{table}/000.") for stage, table in TABLES.items()),
        ("update", "policies/00002"),
        ("held-out", "rounds/00002/held_out.json"),
    ):
        (command,) = {line for line in commands if line.startswith(stage) and output in line.partition("--output")[2]}
        outcome = forks.run("rloo_pipeline", command.split(), project.environment, project.folder)
        assert outcome.returncode == 0, outcome.stderr
    for pattern in ("rounds/00002/*/*", "rounds/*/*.*", "policies/*/*", "trainer/00002/**/*", "tensorboard/*"):
        assert project.files(pattern) == finished.files(pattern) != {}


def test_every_stage_that_a_worker_can_do_was_done_by_one(finished) -> None:
    times = {"rollout": 4, "score": 4, "reference": 4, "update": 2, "gate": 1, "evaluate": 2, "distance": 1}
    times |= {"probe": 1, "checks": 1}
    assert Counter(served(finished)) >= Counter(times)


def test_a_finished_run_has_only_its_last_trainer_state(finished) -> None:
    assert [folder.name for folder in (finished.folder / "results/mini/trainer").iterdir()] == ["00002"]


@pytest.mark.long
def test_workers_that_die_make_a_run_slower_and_no_different(tmp_path, finished) -> None:
    """They die in the second round, whose update then starts from the trainer state on disk. The first round has its
    tables.
    """
    project = Project(tmp_path / "project").take(finished, *AFTER_FIRST_TABLES)
    project.environment["TMPDIR"] = str(tmp_path)
    project.configure()
    run = project.start("--cores", "2", "--", *SECOND_ROUND)
    while run.poll() is None and not (project.folder / "results/mini/rounds/00002/rollouts").is_dir():
        time.sleep(0.1)
    killed = workers(project.folder)
    assert len(killed) == 8
    for worker in killed:
        worker.kill()
    assert run.wait() == 0, (project.folder / "log").read_text()
    assert served(project).count("update") == 1
    for pattern in EVERYTHING:
        assert project.files(pattern) == finished.files(pattern) != {}


def test_workers_end_with_their_snakemake(finished) -> None:
    """The run that this one was copied from has written it."""
    wait_until(lambda: not workers(finished.made_in))
