"""A run that a gate has ended is finished by a second call of Snakemake, and a longer run is not overwritten."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, has_ended, mini, wait_until
from snakemake.scheduling.job_scheduler import JobScheduler

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config import Config
from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import early_stop
from rloo_pipeline.snakemake_ext.snakemake_call import FINISHES, shortened


def test_a_stopped_run_is_finished_by_the_same_call_with_the_configuration_that_it_began_with() -> None:
    argv = ["/bin/snakemake", "--profile", "slurm", "--configfile", "mine.yaml", "--config", "run=x", "rounds=50"]
    again = early_stop.command(Path("copy.yaml"), argv)
    assert again is not None
    assert again[1:] == [
        *("-m", "snakemake", "--profile", "slurm", "--nolock"),
        *("--configfile", "copy.yaml", "--config", "functions=keep"),
    ]
    assert early_stop.command(None, ["/lib/snakemake/__main__.py"]) is not None
    assert early_stop.command(None, ["/bin/jupyter"]) is None, "called from Python, the caller decides"


def test_the_call_that_finishes_a_run_ends_it_where_the_gate_did(tmp_path, monkeypatch) -> None:
    """Not by a key on its command line: a module may take its keys from elsewhere, and another module's run goes on."""
    runs = RunSet({"mini": Config(**mini(rounds=4))})
    write_json(tmp_path / "mini" / "stopped.json", {"round": 3})
    assert shortened(runs, tmp_path).first.rounds == 4, "of a call that the user starts, with more rounds"
    monkeypatch.setenv(FINISHES, "1")
    assert shortened(runs, tmp_path).first.rounds == 3
    assert shortened(runs, tmp_path / "another").first.rounds == 4


def test_sigterm_does_not_wait_for_what_it_interrupts(monkeypatch) -> None:
    """Snakemake waits for the files of a job with the lock that its handler takes, and would wait forever."""
    monkeypatch.setattr(JobScheduler, "exit_gracefully", JobScheduler.exit_gracefully)
    display = SimpleNamespace(stopping=False)
    monkeypatch.setattr(early_stop, "displays", lambda _: [display])
    early_stop.end_gracefully(None)
    scheduler = JobScheduler.__new__(JobScheduler)
    scheduler._lock, scheduler._open_jobs, scheduler._user_kill = threading.Lock(), threading.Semaphore(0), None
    with scheduler._lock:
        interrupted = threading.Thread(target=scheduler.exit_gracefully, args=(signal.SIGTERM, None), daemon=True)
        interrupted.start()
        interrupted.join(60)
        assert not interrupted.is_alive()
        assert display.stopping, "jobs that the signal has ended too are no failures"
    assert scheduler._open_jobs.acquire(timeout=60)
    assert scheduler._user_kill == "graceful"


def test_a_run_that_a_gate_ended_is_not_trained_again_only_up_to_there(tmp_path) -> None:
    """In an experiment it would stay at that round, although another learning rate may cure it."""
    write_json(tmp_path / "mini" / "stopped.json", {"round": 3})
    call = SimpleNamespace(stopped={"mini"}, run_folder=lambda run: tmp_path / run, outputs=set)
    call.runs = RunSet({"mini": Config(**mini(rounds=3))})
    early_stop.refuse_earlier(call)
    call.outputs = lambda: {str(tmp_path / "mini" / "rounds" / "00003" / "metrics.json")}
    with pytest.raises(
        UserError, match=r"a gate ended .*/mini after round 3, but that round .* delete .*/stopped\.json"
    ):
        early_stop.refuse_earlier(call)
    write_json(tmp_path / "other" / "stopped.json", {"round": 2})
    call.stopped.add("other")
    call.runs = RunSet({"mini": Config(**mini(rounds=3)), "other": Config(**mini(rounds=2))})
    call.outputs = lambda: {str(tmp_path / run / "metrics.json") for run in ("mini/rounds/00003", "other/rounds/00002")}
    with pytest.raises(UserError, match=r"/mini after round 3, \S*/other after .* \S*/mini/stop\S+ \S*/other/stopped"):
        early_stop.refuse_earlier(call)


SECOND_CALL = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from rloo_pipeline.snakemake_ext import early_stop

early_stop.end_with_first(SimpleNamespace(main=True))
Path(sys.argv[1]).with_suffix(".new").write_text(str(os.getpid()))
Path(sys.argv[1]).with_suffix(".new").rename(sys.argv[1])
time.sleep(60)
"""


def test_the_call_that_finishes_a_run_ends_with_the_one_that_started_it(tmp_path, monkeypatch) -> None:
    """After kill -9 it would evaluate beside the next call, and each would drop what the other writes."""
    write_json(tmp_path / "mini" / "stopped.json", {"round": 3})
    file = tmp_path / "second"
    monkeypatch.setattr(early_stop, "command", lambda _: [sys.executable, "-c", SECOND_CALL, str(file)])
    monkeypatch.setattr(early_stop, "displays", lambda _: [])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    call = SimpleNamespace(alone=True, config_copy=None, run_folder=lambda run: tmp_path / run)
    call.runs = RunSet({"mini": Config(**mini(rounds=4))})
    call.workflow = SimpleNamespace(dag_settings=SimpleNamespace(targets=[]))
    if not (first := os.fork()):
        try:
            early_stop.finish(call)
        finally:
            os._exit(0)
    try:
        wait_until(file.exists, 60)
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    wait_until(lambda: has_ended(int(file.read_text())), 10)


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished run of five rounds."""
    (tmp_path / "evaluation" / "final").mkdir(parents=True)
    (tmp_path / "summary.json").write_text(json.dumps({"rounds": 5}))
    return tmp_path


def test_fewer_rounds_would_overwrite_it(run) -> None:
    assert "has finished 5 rounds" in (early_stop.overwritten(run, 4) or "")
    assert early_stop.overwritten(run, 5) is None
    assert early_stop.overwritten(run, 6) is None


def test_not_where_its_evaluation_was_removed(run) -> None:
    (run / "evaluation" / "final").rmdir()
    assert early_stop.overwritten(run, 4) is None


def test_not_where_a_gate_ended_the_run_or_it_never_finished(run) -> None:
    write_json(run / "stopped.json", {"round": 4})
    assert early_stop.overwritten(run, 4) is None
    assert early_stop.overwritten(run, 3) is not None
    (run / "summary.json").unlink()
    assert early_stop.overwritten(run, 3) is None
