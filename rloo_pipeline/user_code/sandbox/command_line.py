"""Builds the commands that start a sandboxed Python under bubblewrap or Apptainer, or an unconfined one."""

import functools
import inspect
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from rloo_pipeline.user_code.sandbox.inside import limits as limits_inside

START = """
import json, sys, types
start = json.loads(sys.argv[1])
sys.argv[:] = ["program"]
sys.path[:] = [p for p in sys.path if p] + start["paths"]
import builtins
builtins.exit = builtins.quit = sys.exit
for name, text in start["modules"].items():
    sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), sys.modules[name].__dict__)
sys.modules[name].main(start["limits"])
"""
KEEPER = """
import ctypes, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
_, status = os.waitpid(os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0)
sys.exit(abs(os.waitstatus_to_exitcode(status)))
"""
"""Program that runs Apptainer as its child and kills it when this process dies; bubblewrap does that itself."""
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
FILES_PER_MB = 256
"""Maximum number of files per MiB of /tmp: one per page. An empty file takes 1.4 kB of kernel memory."""
OWN_PROCESSES = {"bubblewrap": 3, "apptainer": 24, "none": 1}
"""Processes and threads of the sandbox itself, which the kernel counts too. Apptainer has many because it is written in
Go.
"""


class SandboxLimits(NamedTuple):
    """Limits of one sandboxed process."""

    seconds: float
    memory_mb: int
    file_mb: int
    processes: int
    open_files: int = 64


class Sandbox(NamedTuple):
    """A way to confine processes that works on this machine."""

    kind: str
    """`bubblewrap`, `apptainer` or `none`."""
    command: str = ""
    sized: bool = False
    """True if the total size of /tmp can be limited."""
    read_only: tuple[str, ...] = ()
    image: str = ""
    counted: bool = False
    """True if the number of files in /tmp can be limited."""


def environment() -> dict[str, str]:
    """Environment of a sandboxed process. From this process it inherits only the search paths of libraries."""
    return ENVIRONMENT | {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}


def interpreter_argv(sandbox: Sandbox, limits: SandboxLimits) -> list[str]:
    """The sandbox's command up to and including the Python interpreter."""
    if sandbox.kind == "bubblewrap":
        return _bubblewrap_argv(sandbox, limits)
    if sandbox.kind == "apptainer":
        options = ["--no-privs", "--net", "--network", "none"]
        options += ["--env", "PYTHONHASHSEED=0,OMP_NUM_THREADS=1,OPENBLAS_NUM_THREADS=1"]
        return apptainer_argv(sandbox.command, options, sandbox.read_only, sandbox.image)
    return [str(_interpreter())]


def apptainer_program() -> str | None:
    """The program Apptainer, or Singularity, its earlier name; None if it is not installed."""
    return shutil.which("apptainer") or shutil.which("singularity")


def apptainer_argv(program: str, options: Sequence[str], read_only: Sequence[str], image: str) -> list[str]:
    """Apptainer's command up to and including the Python interpreter, which is killed with everything that it started
    when this process dies.
    """
    keeper = [str(_interpreter()), "-S", "-c", KEEPER, program]
    binds = [argument for path in read_only for argument in ("--bind", f"{path}:{path}:ro")]
    return [*keeper, "--quiet", "exec", "--containall", "--cwd", "/tmp", *options, *binds, image, "python3"]


def _bubblewrap_argv(sandbox: Sandbox, limits: SandboxLimits) -> list[str]:
    python = _interpreter()
    prefix = python.parent.parent
    mounts = [argument for path in (*OF_SYSTEM, *OF_ETC) for argument in _bind(Path(path), "--ro-bind-try")]
    for path in map(Path, OF_SYSTEM_OR_LINKS):
        if path.is_symlink():
            mounts += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            mounts += ["--ro-bind", str(path), str(path)]
    mounts += ["--size", str(limits.file_mb << 20), "--tmpfs", "/tmp"] if sandbox.sized else ["--dir", "/tmp"]
    mounts += _bind(python if prefix == Path("/usr") else prefix)
    home = Path.home().resolve()
    if home.is_relative_to(prefix):
        mounts += ["--tmpfs", str(home)]
    mounts += [argument for path in sandbox.read_only for argument in _bind(Path(path))]
    namespaces = ["--unshare-all"]
    capabilities = ["--cap-drop", "ALL"]
    if is_real_root():  # no user namespace, because only real root can switch to another user; see limits.apply
        namespaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        capabilities += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if sandbox.counted:  # limits.apply needs it to remount /tmp, and drops it
        capabilities += ["--cap-add", "CAP_SYS_ADMIN"]
        # for any other user, bubblewrap enters a second user namespace, which may not remount anything
        namespaces += [] if is_real_root() else ["--uid", "0", "--gid", "0"]
    return [
        *(sandbox.command, *namespaces, *capabilities, "--die-with-parent", "--new-session", "--dev", "/dev", *mounts),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", str(python)),
    ]


def _bind(path: Path, option: str = "--ro-bind") -> list[str]:
    """Arguments that make a path readable. `--dir` creates its parent folders; otherwise root's bubblewrap makes them
    readable by root only.
    """
    above = [argument for folder in reversed(path.parents[:-1]) for argument in ("--dir", str(folder))]
    return [*above, option, str(path), str(path)]


def python_arguments(
    sandbox: Sandbox, main: ModuleType, limits: SandboxLimits, with_modules: tuple[ModuleType, ...]
) -> list[str]:
    """The interpreter's arguments. They disable site packages and carry the source of the modules, whose files the
    sandbox hides.

    Args:
        sandbox, limits: as for `interpreter_argv`.
        main: the module of `inside/` whose `main` runs.
        with_modules: other modules of `inside/` that it imports.
    """
    start = {
        "paths": [path for path in sandbox.read_only if Path(path).is_dir()],
        "modules": {module.__name__: _source(module) for module in (limits_inside, *with_modules, main)},
        "limits": limits_of_process(sandbox, limits),
    }
    return ["-s", "-S", "-c", START, json.dumps(start)]


def limits_of_process(sandbox: Sandbox, limits: SandboxLimits) -> dict[str, int]:
    """Limits that `inside.limits.apply` sets in the sandboxed process."""
    return {
        "uid": random.randrange(0x60000000, 0x70000000) if _drops_root(sandbox) else 0,
        "files": limits.file_mb * FILES_PER_MB if sandbox.counted else 0,
        "cpu_seconds": math.ceil(limits.seconds) + 1,
        "memory": limits.memory_mb << 20,
        "file_size": limits.file_mb << 20,
        "processes": limits.processes + OWN_PROCESSES[sandbox.kind] + _counted_already(sandbox),
        "open_files": limits.open_files,
    }


@functools.cache
def _source(module: ModuleType) -> str:
    return inspect.getsource(module)


@functools.cache
def _interpreter() -> Path:
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


@functools.cache
def is_real_root() -> bool:
    """True if this process is real root, not root in a user namespace."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split()[2] == "4294967295"


def _drops_root(sandbox: Sandbox) -> bool:
    """True if the sandboxed process switches from root to an unused uid, which is drawn anew for each process."""
    return sandbox.kind == "bubblewrap" and is_real_root()


def _counted_already(sandbox: Sandbox) -> int:
    """Number of this user's threads if the kernel counts them together with the sandbox's; otherwise 0."""
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if _drops_root(sandbox) or (sandbox.kind != "none" and release >= (5, 14)):
        return 0
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.getuid():
                count += len(list((process / "task").iterdir()))
        except OSError:  # it has exited meanwhile
            continue
    return count
