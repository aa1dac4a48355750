"""Confinement of one process: what code that a model wrote may do to this machine.

Two ways, tried in this order; each is probed once a process by a real start, so that what is installed but does not
work here (no user namespaces, say) is not taken.

1. bubblewrap (`bwrap`): namespaces of its own for users, processes, network, IPC and mounts; no capability; a read-only
   root of nothing but the interpreter and the system's libraries; no /proc, no $HOME, no shell; one writable folder,
   /tmp, in memory and of limited size. First, because it starts quickest, takes the interpreter from where it
   is, and its binary needs neither root nor an installation: any `bwrap` on PATH does (`conda install -c conda-forge
   bubblewrap`), where the kernel lets users make namespaces.
2. Apptainer, `exec --containall --net --network none --no-privs`, for clusters that have it and no bubblewrap: the same
   namespaces. It needs an image with a `python3` of 3.9 or newer (the option `image`) and takes longer to start.
   Inside of an Apptainer container there is usually no second Apptainer: put bubblewrap into the image, which works
   there where the cluster's kernel lets users make namespaces. Not for root, whose processes the kernel does not
   limit. (Under bubblewrap root's program becomes another user, so of `read_only` it reads what everybody may.)

`unshare` of util-linux is no third way: it needs the same namespaces as bubblewrap, and its read-only root would be a
script of mounts of our own, to be got right on every distribution.

In each of them the process itself takes on limits before it reads a program: CPU seconds, memory, file size, number of
processes, and a filter of system calls (see `inside/limits.py`). It gets no variable of this process's environment,
and everything that it started is killed with it.

Covered: network (DNS, localhost, vsock, abstract sockets), reading $HOME and all other files but the interpreter's and
the system libraries', this process's environment and memory, writing anywhere but /tmp, signals to other processes,
fork bombs, memory, endless loops, floods of output, large and many files, processes that outlive their parent,
keyrings, user namespaces.

Not covered: holes in the kernel's remaining system calls; the time that others' processes on the same cores lose until
the deadline; memory of all processes together (each is limited, so the most is `memory_mb` × `processes`); how long
something took, which a program can watch. The filter of system calls is for x86-64. A bubblewrap before 0.7 cannot
limit /tmp as a whole, so there nothing is writable. Kernels before 5.14 count a user's processes over the whole
machine, so there `processes` is counted from what runs when the sandbox starts.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO, NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.sandbox.inside import limits as limits_inside
from rloo_pipeline.sandbox.inside import script

START = """
import json, sys, types
given = json.loads(sys.argv[1])
sys.argv[:] = ["program"]
sys.path[:] = [p for p in sys.path if p] + given["paths"]
import builtins
builtins.exit = builtins.quit = sys.exit
for name, text in given["modules"].items():
    sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), sys.modules[name].__dict__)
sys.modules[name].main(given["limits"])
"""
KEEPER = """
import ctypes, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
_, status = os.waitpid(os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0)
sys.exit(abs(os.waitstatus_to_exitcode(status)))
"""
"""Stands before Apptainer, which unlike bubblewrap outlives whoever started it, and kills it when that one dies."""
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
OF_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
OF_SYSTEM_OR_LINKS = ("/lib", "/lib32", "/lib64")
OF_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
OWN_PROCESSES = {"bubblewrap": 3, "apptainer": 24, "none": 1}
"""Processes and threads of the sandbox's own, which the kernel counts with the program's: Apptainer's are of Go."""
PROBE = b"import glob"
"""Something of the standard library that has not been read before the limits."""


class Limits(NamedTuple):
    """What one sandboxed process may use."""

    seconds: float
    memory_mb: int
    file_mb: int
    processes: int


class Sandbox(NamedTuple):
    """A way of confining that works on this machine."""

    kind: str
    """bubblewrap, apptainer, or none."""
    command: str = ""
    sized: bool = False
    """Whether /tmp can be limited as a whole."""
    read_only: tuple[str, ...] = ()
    image: str = ""


@functools.cache
def find(read_only: tuple[str, ...] = (), image: str = "", allow_unconfined: bool = False) -> Sandbox:
    """The first way that works here.

    Raises:
        UserError: none works, and `allow_unconfined` is not true; or a path of `read_only` is not there.
    """
    for path in (*read_only, *([image] if image else [])):
        if not Path(path).exists():
            raise UserError(f"the sandbox shall see '{path}', which is not there: correct the reward's options")
    why = []
    for found in (_bubblewrap(read_only), _apptainer(read_only, image)):
        trouble = found if isinstance(found, str) else _trouble(found)
        if isinstance(found, Sandbox) and not trouble:
            return found
        why.append(trouble)
    if allow_unconfined:
        return Sandbox("none", read_only=read_only)
    raise UserError(
        f"no sandbox for the code of completions ({'; '.join(why)}): install bubblewrap, give 'image' for Apptainer, "
        "or say 'allow_unconfined: true' to run it with your rights, files and network"
    )


def _bubblewrap(read_only: tuple[str, ...]) -> Sandbox | str:
    command = shutil.which("bwrap")
    if command is None:
        return "bubblewrap is not installed"
    told = subprocess.run([command, "--help"], capture_output=True, text=True, check=False).stdout
    return Sandbox("bubblewrap", command, "--size " in told, read_only)


def _apptainer(read_only: tuple[str, ...], image: str) -> Sandbox | str:
    command = shutil.which("apptainer") or shutil.which("singularity")
    if command is None:
        return "Apptainer is not installed"
    if not image:
        return "Apptainer needs the option 'image', a file with a python3"
    if _is_real_root():
        return "Apptainer cannot limit root's processes"
    return Sandbox("apptainer", command, False, read_only, str(Path(image).resolve()))


def _trouble(sandbox: Sandbox) -> str:
    """Empty where a first program ran in the sandbox, else what was said instead."""
    with confined(script, sandbox, Limits(30, 512, 1, 1), stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            _, said = process.communicate(b"%d\n" % len(PROBE) + PROBE, timeout=30)
        except subprocess.TimeoutExpired:
            return f"{sandbox.kind} does not come to an end"
    words = said.decode(errors="replace").strip().splitlines()
    return "" if process.returncode == 0 else f"{sandbox.kind} says: {words[-1] if words else process.returncode}"


@contextmanager
def confined(
    main: ModuleType,
    sandbox: Sandbox,
    limits: Limits,
    with_modules: tuple[ModuleType, ...] = (),
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[bytes]]:
    """A sandboxed Python at work on `main.main`, a module of `inside/`; all of it is dead when the block ends."""
    with tempfile.TemporaryDirectory(prefix="rloo-code-") as scratch:
        process = subprocess.Popen(
            [*words(sandbox, limits), *_start(sandbox, main, limits, with_modules)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=scratch,
            env=ENVIRONMENT | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _kill_group(process)  # also where the process has ended by itself: what it left behind is in its group
            if sandbox.kind == "apptainer":
                _kill_session(process.pid)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _kill_session(leader: int) -> None:
    """The process that serves the image's files to Apptainer: it has a group of its own and outlives who is killed."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            session = stat.read_text().rpartition(") ")[2].split()[3]
            if int(session) == leader:
                os.kill(int(stat.parent.name), signal.SIGKILL)


def words(sandbox: Sandbox, limits: Limits) -> list[str]:
    """The command in front of the interpreter's arguments, the interpreter included."""
    if sandbox.kind == "bubblewrap":
        return _words_of_bubblewrap(sandbox, limits)
    if sandbox.kind == "apptainer":
        binds = [word for path in sandbox.read_only for word in ("--bind", f"{path}:{path}:ro")]
        contained = ("--containall", "--no-privs", "--net", "--network", "none", "--cwd", "/tmp")
        environment = ("--env", "PYTHONHASHSEED=0,OMP_NUM_THREADS=1,OPENBLAS_NUM_THREADS=1")
        command = (str(_interpreter()), "-S", "-c", KEEPER, sandbox.command)
        return [*command, "--quiet", "exec", *contained, *environment, *binds, sandbox.image, "python3"]
    return [str(_interpreter())]


def _words_of_bubblewrap(sandbox: Sandbox, limits: Limits) -> list[str]:
    python = _interpreter()
    prefix = python.parent.parent
    mounts = [word for path in (*OF_SYSTEM, *OF_ETC) for word in ("--ro-bind-try", path, path)]
    for path in map(Path, OF_SYSTEM_OR_LINKS):
        if path.is_symlink():
            mounts += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            mounts += ["--ro-bind", str(path), str(path)]
    mounts += ["--size", str(limits.file_mb << 20), "--tmpfs", "/tmp"] if sandbox.sized else ["--dir", "/tmp"]
    mounts += _bound(python if prefix == Path("/usr") else prefix)
    home = Path.home().resolve()
    if home.is_relative_to(prefix):
        mounts += ["--tmpfs", str(home)]
    mounts += [word for path in sandbox.read_only for word in _bound(Path(path))]
    namespaces = ["--unshare-all"]
    if _is_real_root():  # without a user namespace: only root itself may become another user, see limits.apply
        namespaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    capabilities = ["--cap-drop", "ALL"]
    if _is_real_root():
        capabilities += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [
        *(sandbox.command, *namespaces, *capabilities, "--die-with-parent", "--new-session", "--dev", "/dev", *mounts),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", str(python)),
    ]


def _bound(path: Path) -> list[str]:
    """A path that can be read; the folders above it are made so that whoever the process becomes can pass them."""
    above = [word for folder in reversed(path.parents[:-1]) for word in ("--dir", str(folder))]
    return [*above, "--ro-bind", str(path), str(path)]


def _start(sandbox: Sandbox, main: ModuleType, limits: Limits, with_modules: tuple[ModuleType, ...]) -> list[str]:
    """The interpreter's arguments: no site, no user's packages, and the modules' source, since no file of ours is
    readable there.
    """
    seconds = math.ceil(limits.seconds) + 1
    given = {
        "paths": [path for path in sandbox.read_only if Path(path).is_dir()],
        "modules": {module.__name__: _source(module) for module in (limits_inside, *with_modules, main)},
        "limits": {
            "uid": random.randrange(0x60000000, 0x70000000) if _drops_root(sandbox) else 0,
            "cpu_seconds": seconds,
            "memory": limits.memory_mb << 20,
            "file_size": limits.file_mb << 20,
            "processes": limits.processes + OWN_PROCESSES[sandbox.kind] + _counted_already(sandbox),
        },
    }
    return ["-s", "-S", "-c", START, json.dumps(given)]


@functools.cache
def _source(module: ModuleType) -> str:
    return inspect.getsource(module)


@functools.cache
def _interpreter() -> Path:
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


@functools.cache
def _is_real_root() -> bool:
    """Root of the machine, not of a user namespace."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split()[2] == "4294967295"


def _drops_root(sandbox: Sandbox) -> bool:
    """Whether the process gives root up for a uid that nobody has, drawn for each: it is never seen outside."""
    return sandbox.kind == "bubblewrap" and _is_real_root()


def _counted_already(sandbox: Sandbox) -> int:
    """This user's threads, where the kernel counts them with the sandbox's."""
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if _drops_root(sandbox) or (sandbox.kind != "none" and release >= (5, 14)):
        return 0
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.getuid():
                count += len(list((process / "task").iterdir()))
        except OSError:  # it ended meanwhile
            continue
    return count
