"""Workers keep engines alive between rounds: the bytes are the same as without workers, and with workers that die."""

import re
import subprocess
import sys
import time
from collections import Counter

import forks
import psutil
import pytest
from helpers import AFTER_SFT, Project, wait_until

pytestmark = pytest.mark.slow

TABLES = {"rollout": "rollouts", "score": "scores", "reference": "reference"}
TORCHRUN = "torch.distributed.run"
AFTER_POLICY_0 = tuple(pattern for pattern in AFTER_SFT if pattern != "warmstart")
EVERYTHING = ("warmstart/**/*", "policies/*/*", "rounds/**/*", "trainer/**/*", "evaluation/**/*", "tensorboard/*")


def served(project: Project) -> list[str]:
    """The stages that workers ran, by their logs."""
    logs = (project.folder / "results" / "mini" / "logs" / "workers").glob("*.log")
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return sorted(line.split()[1] for line in lines if line.startswith("rloo ") and line.endswith(": 0"))


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


@pytest.mark.long
def test_workers_that_die_make_a_run_slower_and_no_different(tmp_path, finished) -> None:
    """They die in the second round, whose update then starts from the trainer state on disk."""
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
        assert len(workers) == 8
        for worker in workers:
            worker.kill()
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    assert len(served(project)) < len(served(finished))
    for pattern in EVERYTHING:
        assert project.files(pattern) == finished.files(pattern) != {}


@pytest.mark.long
def test_two_ranks_that_stay_between_rounds_write_the_bytes_of_two_that_start(tmp_path, finished) -> None:
    """One of them is killed in or after the first update. Only updates run: the tables of both rounds are there."""
    two = {"deepspeed": {"processes": 2, "zero_stage": 2}}
    updates = ("--rerun-triggers=mtime", "--retries=0", "results/mini/policies/00002")
    cold, warm = (Project(tmp_path / name) for name in ("cold", "warm"))
    outcome = cold.take(finished, *AFTER_POLICY_0).snakemake("--cores=2", *updates, workers="never", **two)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    warm.take(cold, "policies/0000[12]", "rounds/*/*.*", "trainer", "tensorboard").configure(**two)
    only = ("--allowed-rules", "update", "update_last")
    command = [sys.executable, "-m", "snakemake", "--configfile", "config/test.yaml", "--cores", "2", *updates, *only]
    with subprocess.Popen(command, cwd=warm.folder, env=warm.environment) as process:
        while process.poll() is None and not (warm.folder / "results/mini/rounds/00001/train.parquet").exists():
            time.sleep(0.05)
        running = [one for one in psutil.process_iter(["cmdline", "cwd"]) if one.info["cwd"] == str(warm.folder)]
        ranks = [one for one in running if "--rank" in (words := one.info["cmdline"] or []) and TORCHRUN not in words]
        ranks[-1].kill()
        assert process.wait(600) == 0
    made = "policies/*/*", "rounds/*/metrics.json", "rounds/*/train.parquet", "trainer/00002/**/*", "tensorboard/*"
    for pattern in made:
        assert warm.files(pattern) == cold.files(pattern) != {}


def test_workers_end_with_their_snakemake(finished) -> None:
    """The run that this one was copied from has written it."""

    def living_workers() -> list[psutil.Process]:
        processes = psutil.process_iter(["cmdline", "cwd"])
        workers = [process for process in processes if "worker" in (process.info["cmdline"] or [])]
        return [process for process in workers if process.info["cwd"] == str(finished.made_in)]

    wait_until(lambda: not living_workers())
