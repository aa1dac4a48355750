"""A stage asks a worker: what it gets back, and when it is left to do its work itself."""

import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rloo_pipeline import kept
from rloo_pipeline.config_file import validate
from rloo_pipeline.workers import client, manager

HELP = ["rollout", "--help"]


@pytest.fixture
def controller():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def worker(tmp_path, monkeypatch, controller):
    """A sampler's worker; it is there when its socket is."""
    folder = tmp_path / ("a-folder-with-a-name-longer-than-any-socket-may-have" * 3)
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(client.FOLDER, str(folder))
    socket = folder / "sampler-0.sock"
    command = [sys.executable, "-m", "rloo_pipeline", "worker", "--socket", socket, "--controller", str(controller.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        until(socket.exists)
        yield process
        process.kill()


def until(there) -> None:
    deadline = time.monotonic() + 30
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def asked(words: list[str]) -> int | None:
    """As soon as the worker listens: it may be starting anew."""
    deadline = time.monotonic() + 30
    while (code := client.ask(words)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return code


def test_a_worker_gives_the_exit_status_and_starts_anew_after_a_failure(worker) -> None:
    assert asked(HELP) == 0
    assert asked(["rollout", "--rnd", "1"]) == 2
    assert asked(HELP) == 0
    assert worker.poll() is None


def test_an_answer_is_there_at_once(worker) -> None:
    """And not when the worker looks again whether its asker is still there."""
    assert asked(HELP) == 0
    began = time.monotonic()
    assert [client.ask(HELP) for _ in range(4)] == [0] * 4
    assert time.monotonic() - began < 4 * 0.4


def test_a_long_call_comes_in_pieces(worker) -> None:
    """As that of an update with very many shards."""
    assert asked([*HELP, "--prompts", "x" * 1_000_000]) == 0


def test_what_the_stage_says_comes_out_where_it_was_asked(worker) -> None:
    command = [sys.executable, "-m", "rloo_pipeline", *HELP]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Sample one shard of a round" in said.stderr
    worker.kill()
    worker.wait()
    assert b"rloo rollout --help: 0" in worker.stdout.read()


def test_without_a_free_worker_a_stage_does_its_work_itself(worker) -> None:
    assert client.ask(["report", "--help"]) is None, "no worker does this"
    assert client.ask(["update", "--help"]) is None, "no worker of this role"
    with (Path(os.environ[client.FOLDER]) / "sampler-0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert client.ask(HELP) is None, "busy"
    assert asked(HELP) == 0
    worker.kill()
    worker.wait()
    assert client.ask(HELP) is None, "dead"


def test_a_worker_ends_with_its_controller_and_leaves_nothing(worker, controller) -> None:
    controller.kill()
    controller.wait()
    assert worker.wait(timeout=30) == 0
    assert not Path(os.environ[client.FOLDER]).exists()


def test_nothing_heavy_is_imported_to_ask(worker) -> None:
    """What a stage costs when a worker does it."""
    code = "import sys; sys.argv = ['rloo', 'rollout', '--help']; import rloo_pipeline.__main__ as m\n"
    code += "try: m.main()\nexcept SystemExit: pass\nprint(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name.split(".")[0] for name in said.stdout.split()}
    assert "fcntl" in imported
    assert not imported & {"torch", "vllm", "pyarrow", "pydantic", "yaml", "rich", "numpy"}


def test_the_folder_of_the_sockets_is_ones_own(tmp_path, monkeypatch) -> None:
    started: list[list[str]] = []

    def ended(command, **_) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(poll=lambda: 0)

    monkeypatch.setattr(manager.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", ended)
    monkeypatch.delenv(client.FOLDER, raising=False)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    manager.start(config(rollout={"shards": 3}), 2, tmp_path / "logs")
    monkeypatch.setenv(client.FOLDER, os.environ[client.FOLDER])
    (folder,) = tmp_path.glob("rloo-workers-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(Path(command[5]).name for command in started) == [
        "clerk-0.sock",
        "clerk-1.sock",
        "reader-0.sock",
        "reader-1.sock",
        "sampler-0.sock",
        "sampler-1.sock",
        "trainer-0.sock",
    ]


def test_the_first_stage_finds_its_worker_listening(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(manager.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(client.FOLDER, raising=False)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    already = set(psutil.Process().children())
    manager.start(config(), 1, tmp_path / "logs")
    monkeypatch.setenv(client.FOLDER, os.environ[client.FOLDER])
    try:
        assert client.ask(HELP) == 0, "asked at once, and once"
        by_path(tmp_path, monkeypatch)
    finally:
        for worker in set(psutil.Process().children()) - already:
            worker.kill()


def by_path(folder: Path, monkeypatch) -> None:
    """What a job's shell does with `rloo`: a worker's work where there is one, else that of this environment's."""
    said = subprocess.run("rloo rollout --help", shell=True, capture_output=True, text=True, check=True)
    assert "Sample one shard of a round" in said.stderr
    said = subprocess.run("rloo report --help", shell=True, capture_output=True, text=True, check=True)
    assert "usage: rloo report" in said.stdout, "no worker does this"
    # a controller that another one has started finds both of their folders
    manager._take_the_place_of_rloo(folder / "second")
    monkeypatch.setenv(client.FOLDER, str(folder))
    said = subprocess.run("rloo rollout --help", shell=True, capture_output=True, text=True, check=True, timeout=60)
    assert "Sample one shard of a round" in said.stdout


def test_there_are_no_workers_where_they_could_not_serve() -> None:
    assert manager.wanted(config(workers="never"), 2) == {}
    assert "trainer" not in manager.wanted(config(deepspeed={"processes": 2}), 2)
    assert manager.wanted(config(algorithm={"beta": 0}), 2)["reader"] == 1


def test_a_stage_by_itself_keeps_nothing() -> None:
    assert not kept.keep("thing", 1, object())
    assert kept.take("thing", 1) is None


def test_what_is_kept_under_another_key_is_for_another_process(monkeypatch) -> None:
    monkeypatch.setattr(kept, "_on", True)
    assert kept.keep("thing", 1, "kept")
    assert kept.take("thing", 1) == "kept"
    assert kept.take("thing", 1) is None
    kept.keep("thing", 1, "kept")
    with pytest.raises(kept.Unfit):
        kept.take("thing", 2)
    assert not isinstance(kept.Unfit(), Exception), "no stage catches it"


def config(**changes):
    from helpers import mini

    return validate(mini(**{"workers": "always", **changes}), "test")
