"""Programs cannot exceed their limits of time, memory, processes, output and files."""

import errno
import os
import time

import pytest
from helpers import wait_until
from programs import IMAGE, LIMITS, processes_with

from rloo_pipeline.user_code.sandbox import sandbox
from rloo_pipeline.user_code.sandbox.command_line import FILES_PER_MB, OWN_PROCESSES


def test_a_fork_bomb_stops_at_the_limit_and_is_killed(run_confined, confinement):
    limits = LIMITS._replace(memory_mb=511)
    output = run_confined(
        """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(3000)
            os._exit(0)
        n += 1
except OSError:
    print(n)
""",
        limits,
    )
    assert 1 <= int(output) <= LIMITS.processes + OWN_PROCESSES[confinement.kind]
    wait_until(lambda: processes_with(str(511 << 20)) == [])


@pytest.mark.parametrize(
    "hog",
    [
        "bytearray(1 << 30)",
        "import mmap; mmap.mmap(-1, 1 << 30)",
        "import os; os.write(os.memfd_create('x'), bytes(1 << 20))",
        "import ctypes; assert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0",
        "import ctypes; assert ctypes.CDLL(None).semget(0, 32000, 0o1600) >= 0",
        "import ctypes; assert ctypes.CDLL(None).msgget(0, 0o1600) >= 0",
        "import ctypes; assert ctypes.CDLL(None).syscall(206, 1000, (ctypes.c_ulong * 1)()) == 0",  # io_setup
        "import ctypes; assert ctypes.CDLL(None).inotify_init() >= 0",
        "import ctypes; assert ctypes.CDLL(None).syscall(444, (ctypes.c_ulong * 1)(1), 8, 0) >= 0",  # landlock
        "open('x', 'w').close(); import os; os.setxattr('x', 'user.x', bytes(60000))",
        "import socket; socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)",
        "import ctypes; assert not any(ctypes.CDLL(None).timer_create(0, None, bytes(8)) for _ in range(99))",
        "import ctypes; assert ctypes.CDLL(None).syscall(237, *[0] * 6) == 0",  # mbind
    ],
)
def test_memory_is_limited(run_confined, hog):
    assert run_confined(f"try:\n    {hog}\n    print('had')\nexcept Exception:\n    print('refused')") == "refused\n"


@pytest.mark.parametrize("tests", ["assert f() == 1", [{"input": "", "output": "1"}]])
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(3000)",
        "import signal\nfor n in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU, signal.SIGHUP):\n"
        "    signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_an_endless_program_is_killed_at_its_deadline(reward, program, tests):
    began = time.monotonic()
    assert reward(program, tests, timeout=1) == 0
    assert time.monotonic() - began < 300, "and not when it would end"


def test_a_function_that_never_returns_fails_its_test_and_those_after_it(reward):
    program = "def f(n):\n    while n == 1: pass\n    return n"
    assert reward(program, [f"assert f({n}) == {n}" for n in range(4)], partial=True, timeout=3) == 0.25


def test_a_flood_of_output_ends_a_program_before_its_deadline(reward):
    began = time.monotonic()
    assert reward("while True: print('x' * 100_000)", [{"input": "", "output": "x"}], timeout=600) == 0
    assert time.monotonic() - began < 300


def test_a_program_that_reads_no_input_does_not_block_scoring(reward):
    flood = [{"input": "x" * 10_000_000, "output": "1"}]
    assert reward("print(1)", flood) == 1
    assert reward("import time; time.sleep(60)", flood, timeout=1) == 0


def test_files_are_limited_one_by_one_and_together(run_confined):
    output = run_confined(
        """
def write(name, size):
    try:
        with open(name, "wb") as file:
            for _ in range(size):
                file.write(bytes(1 << 20))
        print("written")
    except OSError:
        print("refused")
write("small", 1)
write("large", 9)
import os
os.remove("large")
for n in range(20):
    write(str(n), 7)
"""
    ).split()
    assert output[:2] == ["written", "refused"]
    assert IMAGE or output[2:].count("written") <= 1


@pytest.mark.parametrize(
    "make", ["open(str(n), 'w').close()", "os.mkdir(str(n))", "os.symlink('x', str(n))", "os.link('0', str(n))"]
)
def test_the_number_of_files_is_limited(run_confined, confinement, make):
    """Empty ones, which a limit of size does not count; 400,000 took 576 MB of the kernel's memory."""
    if not confinement.counted:
        pytest.skip(f"{confinement.kind} cannot limit the number of files here")
    program = f"""
import os
open("0", "w").close()
n = 1
try:
    while n < 5000:
        {make}
        n += 1
except OSError as error:
    print(n, error.errno)
"""
    count, number = map(int, run_confined(program).split())
    assert LIMITS.file_mb * FILES_PER_MB - 10 < count <= LIMITS.file_mb * FILES_PER_MB
    assert number == errno.ENOSPC


def test_where_tmp_cannot_be_remounted_the_sandbox_works_without_that_limit(confinement, tmp_path, monkeypatch):
    """The bwrap on PATH is one that does not give the capability for it."""
    if confinement.kind != "bubblewrap":
        pytest.skip("the limit is bubblewrap's")
    bwrap = tmp_path / "bwrap"
    bwrap.write_text(f'#!/bin/bash\nexec {confinement.command} "${{@/CAP_SYS_ADMIN/CAP_SETUID}}"\n')
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sandbox, "search", sandbox.search.__wrapped__)  # without the cache
    assert sandbox.find() == confinement._replace(command=str(bwrap), counted=False)
