"""No program leaves its sandbox or outlives its run."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from helpers import wait_until
from programs import ADD, IMAGE, LIMITS, processes_with

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.code import code_reward
from rloo_pipeline.user_code.sandbox import sandbox
from rloo_pipeline.user_code.sandbox.inside import script
from rloo_pipeline.user_code.sandbox.inside.limits import READY


@pytest.mark.parametrize("run", ["run_confined", "run_without_limits"])
def test_programs_have_no_network(request, run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        output = request.getfixturevalue(run)(
            f"""
import socket
def attempt(do):
    try:
        do()
        print("connected")
    except OSError as error:
        print("refused")
attempt(lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 2))
attempt(lambda: socket.create_connection(("1.1.1.1", 53), 2))
attempt(lambda: socket.getaddrinfo("example.com", 80))
"""
        )
        assert output.split() == ["refused"] * 3
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("run", ["run_confined", "run_without_limits"])
def test_home_and_other_files_cannot_be_read(request, run, tmp_path):
    secrets = [Path.home() / f".rloo-test-{os.getpid()}", tmp_path / "secret", Path("/etc/passwd")]
    for path in secrets[:2]:
        path.write_text("hush")
    try:
        output = request.getfixturevalue(run)(
            f"""
import os
for path in {[str(path) for path in [*secrets, __file__]]}:
    try:
        print("read", path, "hush" in open(path).read() or path)
    except OSError:
        print("hidden")
for folder, _, files in os.walk("/"):
    if {secrets[0].name!r} in files:
        print("found", folder)
"""
        )
    finally:
        secrets[0].unlink()
    assert [line for line in output.splitlines() if line != "hidden" and not (IMAGE and "/etc/passwd" in line)] == []


@pytest.mark.parametrize("run", ["run_confined", "run_without_limits"])
def test_the_environment_of_this_process_is_not_passed(request, run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hush-hush")
    output = request.getfixturevalue(run)(
        """
import glob, os
print(dict(os.environ))
for file in glob.glob("/proc/*/environ"):
    try:
        print(open(file).read())
    except OSError:
        pass
"""
    )
    assert "PATH" in output
    assert "hush-hush" not in output


@pytest.mark.parametrize("run", ["run_confined", "run_without_limits"])
def test_nothing_outside_the_scratch_folder_can_be_written(request, run, tmp_path):
    output = request.getfixturevalue(run)(
        f"""
import os
for folder, _, files in os.walk("/"):
    if folder.startswith(("/proc", "/sys")):
        continue
    try:
        open(os.path.join(folder, "written"), "w").close()
        print(folder)
    except OSError:
        pass
    for name in files[:3]:
        try:
            open(os.path.join(folder, name), "r+b").close()
            print(os.path.join(folder, name))
        except OSError:
            pass
try:
    open({str(tmp_path / "written")!r}, "w")
    print("out")
except OSError:
    pass
"""
    )
    written = {line for line in output.split() if not line.startswith("/dev/")}
    assert "/tmp" in written
    assert all(line == "/tmp" or line.startswith("/tmp/") or IMAGE for line in written)
    assert "/dev/shm" not in output.split() or IMAGE
    assert not list(tmp_path.iterdir())


def test_other_processes_cannot_be_killed(run_confined, reward):
    program = f"""
import os, signal
for pid in [os.getppid(), {os.getpid()}, {os.getppid()}, -1, *range(2, 5000)]:
    if pid != os.getpid():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
def f(): return 1
print(1)
"""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as neighbour:
        run_confined(program)
        reward(program, "assert f() == 1")
        assert neighbour.poll() is None
        assert neighbour.stdin is not None
        neighbour.stdin.close()
    assert reward(ADD, "assert add(1, 2) == 3") == 1


@pytest.mark.parametrize("ending", ["", "while True: pass", "os._exit(0)"])
def test_child_processes_die_with_their_program(reward, ending):
    program = f"""
import os, time
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 64)
            time.sleep(3000)
        os._exit(0)
print(1, flush=True)
{ending}
"""
    marker = {"": 509, "while True: pass": 508, "os._exit(0)": 507}[ending]
    timeout = 1.5 if "while" in ending else 60.0
    score = reward(program, [{"input": "", "output": "1"}], timeout=timeout, memory_mb=marker)
    assert score == (0 if "while" in ending else 1), "the program ran until its children were started"
    reward(program, "assert f() == 1", timeout=timeout, memory_mb=marker)
    wait_until(lambda: processes_with(str(marker << 20)) == [])


def test_a_program_dies_with_the_process_that_scores_it(confinement):
    call = (
        "from rloo_pipeline.rewards.code import code_reward\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def score(tests): code_reward(['import time; time.sleep(3000)'], tests=[tests],"
        f" timeout=3000, memory_mb=506, image={IMAGE!r})\n"
        "with ThreadPoolExecutor() as threads:\n"
        "    [*threads.map(score, ['assert f()', [{'input': '', 'output': ''}]])]\n"
    )
    marker = str(506 << 20)
    with subprocess.Popen([sys.executable, "-c", call]) as scorer:
        wait_until(lambda: len(processes_with(marker)) >= 3)
        time.sleep(1.5)  # so that the programs usually run by then; they must also die if they do not
        scorer.kill()
    wait_until(lambda: processes_with(marker) == [])


def test_the_filter_denies_new_namespaces_keyrings_and_unusual_sockets(run_confined):
    output = run_confined(
        """
import ctypes, os, threading
libc = ctypes.CDLL(None, use_errno=True)
for call in ((272, 0x10000000), (250, 0, -3, 1), (41, 40, 1, 0), (41, 16, 3, 0), (425, 8, 0), (321, 0, 0), (101, 0)):
    result = libc.syscall(*call)
    print(result, ctypes.get_errno())
print(libc.syscall(56, 0x10000011, 0, 0, 0, 0))
thread = threading.Thread(target=print, args=("threads work",))
thread.start(); thread.join()
"""
    )
    assert output.splitlines() == ["-1 1"] * 7 + ["-1", "threads work"]


def test_system_calls_that_nobody_judged_do_not_exist(run_confined):
    program = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
print([(libc.syscall(number, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()]) for number in (451, 463, 999)])
"""
    assert eval(run_confined(program)) == [(-1, "ENOSYS")] * 3


CAPABILITIES = """
import ctypes, struct
libc, data = ctypes.CDLL(None), ctypes.create_string_buffer(24)
print(libc.capget(struct.pack("Ii", 0x20080522, 0), data), any(data.raw), libc.prctl(39, 0, 0, 0, 0), flush=True)
"""


def test_a_program_has_no_capability_and_gets_none_by_starting_another(run_confined):
    start = f"import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', {CAPABILITIES!r}])"
    assert run_confined(CAPABILITIES + start).splitlines() == ["0 False 1"] * 2


def test_the_program_is_not_root(run_confined):
    output = run_confined("import os\ntry: os.setuid(0)\nexcept OSError: print('no root')")
    assert output == "no root\n" or os.getuid() == 0  # root within a user namespace has no rights outside it


def test_no_process_of_the_sandbox_outlives_the_program(confinement):
    """The process that serves Apptainer's image has a process group of its own."""
    with sandbox.confined(script, confinement, LIMITS, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(len(READY)) == READY
    wait_until(lambda: process.pid not in map(session_of, psutil.pids()))


def session_of(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)


def test_further_paths_can_be_read_and_imported(tmp_path, confinement):
    tmp_path.chmod(0o755)  # where root runs this, the program is another user
    (tmp_path / "helper.py").write_text("def twice(x): return 2 * x")
    options = {"read_only": [str(tmp_path)], "image": IMAGE}
    assert code_reward(["from helper import twice as f"], tests=["assert f(2) == 4"], **options) == [1]
    with pytest.raises(UserError, match="does not exist"):
        code_reward(["x"], tests=["assert x"], read_only=["/no/such/folder"])
