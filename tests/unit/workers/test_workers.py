"""Stages on workers: the results that a client gets, and when a stage runs in its own process."""

import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from helpers import wait_until

from rloo_pipeline.config import REWARD_MODEL
from rloo_pipeline.config.loading import validate
from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.runtime import devices, scratch
from rloo_pipeline.workers import client, engine_cache, gpu_shares, manager, server

HELP = ["rollout", "--help"]
ALL = client.ROLES.keys()


@pytest.fixture
def controller():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@contextmanager
def listening(folder: Path, controller: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """A sampler's worker that listens in a new folder."""
    folder.mkdir(mode=0o700)
    socket = folder / "sampler-0.sock"
    command = [sys.executable, "-m", "rloo_pipeline", "worker", "--socket", socket, "--controller", str(controller.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_until(socket.exists)
        yield process
        process.kill()


@pytest.fixture
def worker(tmp_path, monkeypatch, controller):
    folder = tmp_path / ("a-folder-with-a-name-longer-than-any-socket-may-have" * 3)
    monkeypatch.setenv(client.FOLDER, str(folder))
    with listening(folder, controller) as process:
        yield process


@pytest.fixture(scope="module")
def folder_of_a_worker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared") / "workers"
    with subprocess.Popen(["sleep", "6000"]) as controller, listening(folder, controller):
        yield folder
        controller.kill()


@pytest.fixture
def shared_worker(folder_of_a_worker, monkeypatch):
    """A worker that tests share, since they leave it as it is."""
    monkeypatch.setenv(client.FOLDER, str(folder_of_a_worker))


def test_a_trainer_imports_its_libraries_before_its_first_stage(tmp_path, controller) -> None:
    argv = ["worker", "--socket", tmp_path / "trainer-0.sock", "--controller", str(controller.pid), "--preload", "1"]
    with subprocess.Popen([sys.executable, "-m", "rloo_pipeline", *argv], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text())
        process.kill()


def run_when_ready(argv: list[str]) -> int | None:
    """Runs a stage as soon as the worker listens, which may be restarting."""
    codes: list[int | None] = []
    wait_until(lambda: codes.append(client.run_stage(argv)) or codes[-1] is not None)
    return codes[-1]


def test_a_worker_returns_the_exit_status_and_restarts_after_a_failure(worker) -> None:
    assert run_when_ready(HELP) == 0
    assert run_when_ready(["rollout", "--rnd", "1"]) == 2
    assert run_when_ready(HELP) == 0
    assert worker.poll() is None


@pytest.mark.parametrize(("code", "status"), [(None, 0), (3, 3), ("no such thing", 1)])
def test_a_stage_that_ends_itself_has_the_exit_status_that_python_gives(code, status, capfd) -> None:
    assert server.status_of(lambda _: sys.exit(code), []) == status
    assert capfd.readouterr().err == (f"{code}\n" if isinstance(code, str) else "")


def test_a_worker_restarts_with_its_environment_of_before_the_stages(tmp_path, monkeypatch) -> None:
    """One that had a GPU of several for a stage would have only that one for all later ones."""
    started, path = list[str](), tmp_path / "sampler-0.sock"

    def answer(*_: object) -> bool:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        return False

    def connect() -> None:
        wait_until(path.exists)
        with socket.socket(socket.AF_UNIX) as connection:
            client.with_short_path(connection.connect, str(path))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv(client.FOLDER, str(tmp_path))  # the worker sets it, too
    monkeypatch.setattr(scratch, "use", lambda: None)
    for name, function in (("_answer", answer), ("_end_with", lambda *_: None)):
        monkeypatch.setattr(server, name, function)
    monkeypatch.setattr(engine_cache, "enable", lambda: None)
    monkeypatch.setattr(os, "execv", lambda *_: started.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call[2]["CUDA_VISIBLE_DEVICES"]))
    with ThreadPoolExecutor() as other:
        other.submit(connect)
        server.serve(lambda _: None, lambda _: None, path, os.getpid())
    assert started == ["0,1"]


UNFIT = """
import sys, time
from pathlib import Path
from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.workers import server

def run(_):
    raise IncompatibleEngine("another model")

send = server._send
server._send = lambda *answer: (send(*answer), time.sleep(1))
server.serve(run, lambda _: None, Path(sys.argv[3]), int(sys.argv[5]))
"""
"""A worker whose engine fits no stage, until it has restarted, a while after its answer, as any other worker."""


def test_a_stage_that_an_engine_does_not_fit_runs_in_its_worker_after_a_restart(
    tmp_path, monkeypatch, controller
) -> None:
    path = tmp_path / "sampler-0.sock"
    monkeypatch.setenv(client.FOLDER, str(tmp_path))
    monkeypatch.setitem(client.PATIENCE, "sampler", 300)
    command = [sys.executable, "-c", UNFIT, "worker", "--socket", path, "--controller", str(controller.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_until(path.exists)
        code = client.run_stage(HELP)
        process.kill()
        said = process.stdout.read()
    assert code == 0
    assert b"waits until this worker has restarted, since it holds another model" in said
    assert b"rloo rollout --help: 0" in said


def test_an_answer_ends_the_connection_although_a_thread_still_polls_it() -> None:
    """Else it would arrive only when the worker next looks whether its client still exists."""
    connection, of_client = socket.socketpair()
    with of_client, connection.dup():  # what is polled stays open
        with connection:
            server._send(connection, 3)
        of_client.settimeout(60)
        assert b"".join(iter(lambda: of_client.recv(4096), b"")) == b'{"code": 3}'


def test_a_long_request_arrives_in_pieces(shared_worker) -> None:
    """Like the call of an update with very many shards."""
    assert run_when_ready([*HELP, "--prompts", "x" * 1_000_000]) == 0


def test_a_request_that_stops_half_way_does_not_stop_the_worker(worker) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        client.with_short_path(connection.connect, str(Path(os.environ[client.FOLDER]) / "sampler-0.sock"))
        connection.send(b'{"words": [')
        assert client.run_stage(HELP) == 0
        assert connection.recv(1) == b""


def test_the_output_of_a_stage_goes_to_its_client(worker) -> None:
    command = [sys.executable, "-m", "rloo_pipeline", *HELP]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Sample one shard of a round" in outcome.stderr
    worker.kill()
    worker.wait()
    assert b"rloo rollout --help: 0" in worker.stdout.read()


def test_a_stage_waits_for_a_busy_worker_as_long_as_an_engine_takes_to_start(shared_worker) -> None:
    with (Path(os.environ[client.FOLDER]) / "sampler-0.lock").open("w") as lock, ThreadPoolExecutor() as other:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = other.submit(client.run_stage, HELP)
        assert not wait([answer], timeout=0.2).done
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert answer.result() == 0


def test_without_a_free_worker_a_stage_runs_in_its_own_process(worker, monkeypatch) -> None:
    monkeypatch.setitem(client.PATIENCE, "sampler", 0.1)
    assert client.run_stage(["report", "--help"]) is None, "no worker does this"
    assert client.run_stage(["update", "--help"]) is None, "no worker of this role"
    with (Path(os.environ[client.FOLDER]) / "sampler-0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert client.run_stage(HELP) is None, "busy"
    assert run_when_ready(HELP) == 0
    worker.kill()
    worker.wait()
    assert client.run_stage(HELP) is None, "dead"


def test_a_stage_runs_in_its_own_process_if_the_folder_of_the_workers_goes_meanwhile(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(client.FOLDER, str(tmp_path / "workers"))
    monkeypatch.setattr(client, "_listening", lambda *_: [str(tmp_path / "workers" / "sampler-0")])
    assert client.run_stage(HELP) is None


def test_a_worker_ends_with_its_controller_and_leaves_nothing(worker, controller) -> None:
    controller.kill()
    controller.wait()
    assert worker.wait(timeout=300) == 0
    assert not Path(os.environ[client.FOLDER]).exists()


def test_a_worker_that_starts_after_its_controller_has_ended_leaves_nothing(tmp_path) -> None:
    folder = tmp_path / "workers"
    folder.mkdir()
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    argv = ["worker", "--socket", folder / "sampler-0.sock", "--controller", str(ended.pid)]
    outcome = subprocess.run([sys.executable, "-m", "rloo_pipeline", *argv], timeout=300, check=False)
    assert outcome.returncode == 0
    assert not folder.exists()


def test_temporary_files_stay_while_a_worker_imports_its_engine_and_go_when_it_ends(tmp_path, controller) -> None:
    """vLLM's import of torch makes `torchinductor_USER` in TMPDIR. If another worker had removed the folder of the
    killed Snakemake by then, torch would make it anew, without a lock, and it would stay forever.
    """
    folder = tmp_path / "tmp" / "snakemake-killed"
    folder.mkdir(parents=True)
    (folder.parent / f"{scratch.LOCK}{folder.name}").write_text(socket.gethostname())
    path = tmp_path / "workers" / "scorer-0.sock"
    path.parent.mkdir()
    command = [sys.executable, "-m", "rloo_pipeline", "worker", "--socket", path, "--controller", str(controller.pid)]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(folder)}) as process:
        wait_until(path.exists)
        scratch.remove_abandoned(folder.parent)
        stayed = folder.exists()
        controller.kill()
        controller.wait()
        assert process.wait(timeout=300) == 0
    assert stayed
    assert list(folder.parent.iterdir()) == []


def test_what_torch_makes_while_it_is_imported_in_a_worker_that_ends_is_not_in_the_folder_that_goes(
    tmp_path, monkeypatch
) -> None:
    """The worker ends in a thread, beside the import."""
    folder = tmp_path / "snakemake"
    folder.mkdir()
    (tmp_path / f"{scratch.LOCK}{folder.name}").write_text(socket.gethostname())
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unset")
    made = list[str]()
    monkeypatch.setattr(server.kept_ranks, "close", lambda: made.append(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    monkeypatch.setattr(scratch, "leave", lambda: None)
    monkeypatch.setattr(os, "_exit", lambda _: None)
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    server._end_with(ended.pid, tmp_path / "workers")
    assert made == [str(tmp_path)]


def test_a_client_imports_nothing_heavy(shared_worker) -> None:
    """The imports of a stage that a worker runs."""
    code = "import sys; sys.argv = ['rloo', 'rollout', '--help']; import rloo_pipeline.__main__ as m\n"
    code += "try: m.main()\nexcept SystemExit: pass\nprint(*sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name.split(".")[0] for name in outcome.stdout.split()}
    assert "fcntl" in imported
    assert not imported & {"torch", "vllm", "pyarrow", "pydantic", "yaml", "rich", "numpy"}


def test_only_the_user_can_enter_the_folder_of_the_sockets(tmp_path, monkeypatch) -> None:
    started: list[list[str]] = []

    def ended(command, **_) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(poll=lambda: 0)

    monkeypatch.setattr(manager.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", ended)
    monkeypatch.delenv(client.FOLDER, raising=False)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    manager.start(config(rollout={"shards": 3}), 2, tmp_path / "logs", ALL)
    monkeypatch.setenv(client.FOLDER, os.environ[client.FOLDER])
    (folder,) = tmp_path.glob("rloo-workers-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(Path(command[5]).name for command in started if "worker" in command) == [
        "logprobs-0.sock",
        "logprobs-1.sock",
        "observer-0.sock",
        "sampler-0.sock",
        "sampler-1.sock",
        "scorer-0.sock",
        "scorer-1.sock",
        "trainer-0.sock",
    ]


def test_the_first_stage_finds_its_worker_listening(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(manager.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(client.FOLDER, raising=False)
    already = set(psutil.Process().children())
    program = ("env", "RLOO_TEST_IMAGE=1", sys.executable, "-m", "rloo_pipeline")  # an image's is as long
    manager.start(config(), 1, tmp_path / "logs", {"score"}, program=program)
    monkeypatch.setenv(client.FOLDER, os.environ[client.FOLDER])
    try:
        assert client.run_stage(["score", "--help"]) == 0
    finally:
        for worker in set(psutil.Process().children()) - already:
            worker.kill()
    log = (tmp_path / "logs" / "scorer-0.log").read_text().splitlines()
    assert [line for line in log if "so far" not in line] == ["rloo score --help: 0"], "asked once"


@pytest.fixture
def silent(tmp_path, monkeypatch):
    """A sampler's worker that takes requests and never answers."""
    folder = tmp_path / "workers"
    folder.mkdir()
    monkeypatch.setenv(client.FOLDER, str(folder))
    with socket.socket(socket.AF_UNIX) as listener:
        client.with_short_path(listener.bind, str(folder / "sampler-0.sock"))
        listener.listen(1)
        yield listener


def stage(*argv: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "rloo_pipeline", *argv], stderr=subprocess.PIPE, text=True)


def test_a_worker_notices_that_its_client_was_killed(silent) -> None:
    """Like an interrupt on the terminal, which reaches the stage and no worker."""
    with stage("rollout", "--round", "1") as process:
        connection, _ = silent.accept()
        assert b'"--round", "1"' in connection.recv(1000)
        process.kill()
    assert connection.recv(1000) == b"", "a worker ends with it"


def test_when_its_worker_dies_a_stage_runs_in_its_own_process(silent) -> None:
    with stage("rollout", "--round", "x") as process:
        connection, _ = silent.accept()
        assert connection.recv(1000)
        connection.close()
        assert process.wait(300) == 2, "it reads its own arguments"
        assert "rloo rollout" in process.stderr.read()


def test_a_stage_ends_with_the_snakemake_that_started_it(silent) -> None:
    """Its workers are gone with their folder, and nobody reads what it would write."""
    with stage("rollout", "--round", "x") as process:
        connection, _ = silent.accept()
        assert connection.recv(1000)
        shutil.rmtree(os.environ[client.FOLDER])
        connection.close()
        assert process.wait(300) == 1
        assert process.stderr.read() == ""


def test_workers_that_could_not_be_used_are_not_started() -> None:
    assert manager.worker_counts(config(workers="never"), 2, ALL) == {}
    assert manager.worker_counts(config(algorithm={"beta": 0}), 2, ALL)["logprobs"] == 1
    assert manager.worker_counts(config(), 2, {"report", "gate"}) == {"scorer": 2}, "those that have something to do"


def test_outside_of_a_worker_no_engine_is_kept() -> None:
    assert not engine_cache.keep("thing", 1, object())
    assert engine_cache.take("thing", 1) is None


def test_an_engine_with_another_key_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(engine_cache, "_enabled", True)
    assert engine_cache.keep("thing", 1, "kept")
    assert engine_cache.take("thing", 1) == "kept"
    assert engine_cache.take("thing", 1) is None
    engine_cache.keep("thing", 1, "kept")
    with pytest.raises(IncompatibleEngine):
        engine_cache.take("thing", 2)
    assert not isinstance(IncompatibleEngine(), Exception), "no stage catches it"


class Holder:
    """An object on a GPU that can leave it or not."""

    def __init__(self, can_leave: bool) -> None:
        self.can_leave, self.has_left = can_leave, False
        devices.hold_gpu(self)

    def leave_gpu(self) -> None:
        if not self.can_leave:
            raise IncompatibleEngine("an engine")
        self.has_left = True


@pytest.mark.parametrize("can_leave", [True, False])
def test_an_engine_that_cannot_leave_the_gpu_is_dropped(monkeypatch, can_leave) -> None:
    monkeypatch.setattr(engine_cache, "_enabled", True)
    holder = Holder(can_leave)
    engine_cache.keep("thing", 1, holder)
    assert engine_cache.leave_gpu() == holder.has_left == can_leave
    assert ("thing" in engine_cache._engines) == can_leave
    engine_cache._engines.clear()


def config(**changes):
    from helpers import mini

    return validate(mini(**{"workers": "always", **changes}), "test")


def test_on_gpus_there_are_as_many_workers_as_gpus_for_them(monkeypatch) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    sharded = config(rollout={"shards": 3}, vllm={"threads": 1})
    counts = manager.worker_counts(sharded, 8, ALL)
    assert [counts[role] for role in ("sampler", "logprobs", "trainer")] == [1, 1, 1], "they take turns"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert manager.worker_counts(sharded, 8, ALL)["sampler"] == 3
    wide = config(rollout={"shards": 3}, vllm={"threads": 1, "tensor_parallel_size": 2})
    assert manager.worker_counts(wide, 8, ALL)["sampler"] == 2
    ranks = config(deepspeed={"processes": 4, "zero_stage": 2})
    assert manager.worker_counts(ranks, 8, ALL)["trainer"] == 1
    for fixed in ({"zero_stage": 3}, {"zero_stage": 2, "offload": {"optimizer": "cpu"}}):
        counts = manager.worker_counts(config(deepspeed={"processes": 4, **fixed}), 8, ALL)
        assert "trainer" not in counts, "its ranks could not leave the GPUs"
        assert ("logprobs" in counts) == (fixed["zero_stage"] < 3)


def test_a_stage_asks_the_worker_that_has_its_engine_first(tmp_path, monkeypatch) -> None:
    """That is the one that served the same run, or the same reward that runs alone; then a new one; then another."""
    monkeypatch.setenv(client.FOLDER, str(tmp_path))
    listeners = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for number, listener in enumerate(listeners):
        client.with_short_path(listener.bind, str(tmp_path / f"scorer-{number}.sock"))
        listener.listen()

    def asked(run: str, *only: str) -> str:
        lock, connection = client._connect("scorer", ["score", *only, "--output", f"{run}/rounds/1/x"], 2, False)
        with connection:
            os.close(lock)
            return Path(connection.getpeername()).stem

    for _ in range(2):
        assert asked("a", "--only", "model") == "scorer-0"
        assert asked("a") == "scorer-1"
    assert asked("b") == "scorer-2"
    assert asked("a", "--only", "model") == "scorer-0"
    assert asked("a", "--only", "other") == "scorer-0"


@pytest.mark.parametrize(
    ("current", "asks", "waits"),
    [("call-model", "score", True), ("score", "call-model", True), ("score", "score", False)],
)
def test_a_stage_waits_longer_rather_than_load_a_reward_model_that_a_worker_is_loading(
    tmp_path, monkeypatch, current, asks, waits
) -> None:
    monkeypatch.setenv(client.FOLDER, str(tmp_path))
    monkeypatch.setitem(client.PATIENCE, "scorer", 0.1)
    with socket.socket(socket.AF_UNIX) as listener, (tmp_path / "scorer-0.lock").open("w") as lock:
        client.with_short_path(listener.bind, str(tmp_path / "scorer-0.sock"))
        listener.listen()
        lock.write(f"results/a\n{current}")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor() as other:
            answer = other.submit(client._connect, "scorer", [asks, "--output", "results/a"], 2, False)
            assert wait([answer], timeout=1 if waits else 60).done == (set() if waits else {answer})
            fcntl.flock(lock, fcntl.LOCK_UN)
            connected = answer.result()
    assert (connected is not None) == waits
    if connected:
        os.close(connected[0])
        connected[1].close()


def test_on_a_gpu_a_scorer_counts_only_with_a_reward_model() -> None:
    roles = {"scorer", "observer", "trainer"}
    model = {"function": REWARD_MODEL, "options": {"model": "x"}}
    assert gpu_shares.idle(roles, config()) == "trainer"
    assert gpu_shares.idle(roles, config(rewards=[model])) == "trainer", "on CPUs"
    two = [model | {"name": name, "gpus": 1} for name in "ab"]
    assert gpu_shares.idle(roles, config(rewards=two)) == "scorer scorer trainer"


def test_a_worker_sees_whose_process_asks() -> None:
    ours, other = socket.socketpair(socket.AF_UNIX)
    with ours, other:
        assert client.peer(ours) == (os.getpid(), os.getuid())
