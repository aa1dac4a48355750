"""Ranks that torchrun starts."""

import os
import subprocess
import sys
from unittest import mock

import forks
import psutil
import pytest
import torch
import yaml
from helpers import has_ended, mini, wait_until
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import errors

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import controller_watch, ranks


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f'printf "my.yaml: a key; drop it" > "${ranks.FAILED}"; exit 1', "my.yaml: a key; drop it"),
        ("exit 3", "exit code 3"),
        ("exit 135", "killed by SIGBUS"),
        ("kill -9 $$", "their launcher was killed by SIGKILL"),
    ],
)
def test_the_error_of_the_first_rank_that_fails_is_the_stages(monkeypatch, script, why) -> None:
    monkeypatch.setattr(ranks, "torchrun_command", lambda *_: ["sh", "-c", script])
    with pytest.raises(UserError, match=f"^one of the 2 ranks failed: {why}"):
        ranks.torchrun(2, ["update"])


LOST = "my.yaml: a key; drop it"


@pytest.mark.parametrize(
    ("codes", "why"),
    [
        ((-9, 1), "rank 0 was killed by SIGKILL; if memory ran out, give the job more"),
        ((1, -9), "rank 1 was killed by SIGKILL; if memory ran out, give the job more"),
        ((-11, 1), f"rank 0 was killed by SIGSEGV; the first error was: {LOST}"),
        ((1, -15), LOST),
        ((-6, 1), LOST),
    ],
)
def test_a_rank_that_a_signal_killed_is_the_cause_of_the_errors_of_others(tmp_path, monkeypatch, codes, why) -> None:
    failures = {rank: errors.ProcessFailure(rank, 0, code, "") for rank, code in enumerate(codes)}
    monkeypatch.setattr(run, "main", mock.Mock(side_effect=errors.ChildFailedError("rloo", failures)))
    failed = tmp_path / "failed"
    failed.write_text(LOST)
    monkeypatch.setenv(ranks.FAILED, str(failed))
    with pytest.raises(errors.ChildFailedError):
        ranks.main()
    assert failed.read_text() == why


STAGE = """
import sys
from rloo_pipeline.runtime import ranks

ranks.torchrun_command = lambda _, arguments: [sys.executable, "-m", "rloo_pipeline", *arguments]
ranks.torchrun(2, sys.argv[1:])
"""


def test_ranks_end_with_the_stage_that_started_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(controller_watch.VARIABLE, controller_watch.name())  # Snakemake, which goes on
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(mini()))
    arguments = ["watch", tmp_path, "--every", "0.1", "--log", tmp_path / "log"]
    with subprocess.Popen([sys.executable, "-c", STAGE, *map(str, arguments)]) as stage:
        wait_until((tmp_path / "log").exists)
        [rank] = psutil.Process(stage.pid).children()
        stage.kill()
    wait_until(lambda: has_ended(rank.pid), 60)


def connect_alone() -> tuple[str, int]:
    """The port that is named before a process connects to itself, and the number of ranks then."""
    for name in ("RANK", "MASTER_PORT"):
        os.environ.pop(name, None)
    ranks.use_single_process()
    torch.distributed.init_process_group("gloo")
    return os.environ["MASTER_PORT"], torch.distributed.get_world_size()


def test_a_process_alone_takes_the_port_that_is_free_when_it_listens() -> None:
    assert forks.call(connect_alone) == ("0", 1)
