"""Confines one process, so that code written by a model cannot harm this machine.

There are two methods, tried in this order. Each is probed once per process by running a program, so that a tool which
is installed but does not work here (say, for lack of user namespaces) is not used.

1. bubblewrap (`bwrap`): new namespaces for users, processes, network, IPC and mounts; no capabilities; a read-only root
   with only the interpreter and the system's libraries; no /proc, no $HOME, no shell; one writable folder, /tmp, in
   memory, of limited size and number of files. It comes first because it starts fastest, uses the interpreter in place,
   and its binary needs neither root nor an installation: any `bwrap` on PATH works (`conda install -c conda-forge
   bubblewrap`) where the kernel lets users create namespaces.
2. Apptainer, `exec --containall --net --network none --no-privs`, for clusters without bubblewrap: the same namespaces.
   It needs an image with a `python3` of 3.9 or newer (the option `image`) and starts more slowly. Inside an Apptainer
   container there is usually no second Apptainer: the images of `make images` have bubblewrap, which works there where
   the cluster's kernel lets users create namespaces. Not available to root, whose processes the kernel does not limit.
   (Under bubblewrap, root's program becomes another user, so it can read only those files in `read_only` that everybody
   may read.)

`unshare` from util-linux is not a third method: it needs the same namespaces as bubblewrap, and a read-only root would
need our own mount script, which would have to be right on every distribution.

With both, the process sets its own limits before it reads a program: CPU seconds, memory, file size, number of
processes, and a system call filter (see `inside/limits.py`). It inherits none of this process's environment variables,
and all processes that it starts are killed with it.

Covered: network (DNS, localhost, vsock, abstract sockets); reading $HOME and all other files except the interpreter's
and the system libraries'; this process's environment and memory; writing anywhere but /tmp; signals to other processes;
fork bombs, memory, endless loops, floods of output, large or many files; processes that outlive their parent; keyrings;
user namespaces; kernel memory through semaphores, message queues, events, timers, extended attributes and large socket
buffers.

Not covered: vulnerabilities in the remaining system calls; the CPU time that other processes on the same cores lose
until the deadline; the total memory of all processes (each is limited, so the maximum is `memory_mb` × `processes`);
kernel memory that comes with memory and open files (at most twice `memory_mb` of page tables and 20 MB of buffers per
process); timing, which a program can measure. The system call filter is for x86-64 only. Before version 0.7, bubblewrap
cannot limit the size of /tmp, so nothing is writable there. Under Apptainer, and where the kernel does not allow
remounting /tmp in bubblewrap, many small files take kernel memory (1.4 kB each) until the program ends; only a memory
cgroup, such as that of a SLURM job, limits this. Kernels before 5.14 count a user's processes over the whole machine,
so there `processes` is added to the number that run when the sandbox starts.
"""

import functools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.sandbox.command_line import (
    Sandbox,
    SandboxLimits,
    apptainer_program,
    environment,
    interpreter_argv,
    is_real_root,
    python_arguments,
)
from rloo_pipeline.user_code.sandbox.inside import script

PROBE = b"import glob"
"""A standard library module that is not yet loaded when the limits are set."""


def find(read_only: tuple[str, ...] = (), image: str = "", allow_unconfined: bool = False) -> Sandbox:
    """Returns the first sandbox that works here.

    Raises:
        UserError: none works and `allow_unconfined` is false; or a path in `read_only` does not exist.
    """
    for path in (*read_only, *([image] if image else [])):
        if not Path(path).exists():
            raise UserError(f"the sandbox needs '{path}', which does not exist: correct the reward's options")
    sandbox_or_reason = search(read_only, image)
    if isinstance(sandbox_or_reason, Sandbox):
        return sandbox_or_reason
    if allow_unconfined:
        return Sandbox("none", read_only=read_only)
    raise UserError(
        f"no sandbox for the code of completions ({sandbox_or_reason}): install bubblewrap, set 'image' for "
        "Apptainer, or set 'allow_unconfined: true' to run it with your rights, files and network"
    )


@functools.cache
def search(read_only: tuple[str, ...] = (), image: str = "", in_image: bool = False) -> Sandbox | str:
    """Returns the first sandbox that works here, or the reason why none does. With `in_image`, it must be able to run
    the image.
    """
    candidates: list[Sandbox | str] = [_apptainer(read_only, image)]
    if not in_image:
        bubblewrap = _bubblewrap(read_only)
        counting = [bubblewrap._replace(counted=True)] if isinstance(bubblewrap, Sandbox) and bubblewrap.sized else []
        candidates = [*counting, bubblewrap, *candidates]
    reasons = []
    for candidate in candidates:
        reason = candidate if isinstance(candidate, str) else _probe(candidate)
        if isinstance(candidate, Sandbox) and not reason:
            return candidate
        reasons.append(reason)
    return "; ".join(reasons)


def _bubblewrap(read_only: tuple[str, ...]) -> Sandbox | str:
    command = shutil.which("bwrap")
    if command is None:
        return "bubblewrap is not installed"
    usage = subprocess.run([command, "--help"], capture_output=True, text=True, check=False).stdout
    return Sandbox("bubblewrap", command, "--size " in usage, read_only)


def _apptainer(read_only: tuple[str, ...], image: str) -> Sandbox | str:
    command = apptainer_program()
    if command is None:
        return "Apptainer is not installed"
    if not image:
        return "Apptainer needs the option 'image', a file with a python3"
    if is_real_root():
        return "Apptainer cannot limit root's processes"
    return Sandbox("apptainer", command, False, read_only, str(Path(image).resolve()))


def _probe(sandbox: Sandbox) -> str:
    """Runs a test program. Returns why it failed, or an empty string if it succeeded."""
    limits = SandboxLimits(30, 512, 1, 1)
    with confined(script, sandbox, limits, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            _, errors = process.communicate(b"%d\n" % len(PROBE) + PROBE, timeout=30)
        except subprocess.TimeoutExpired:
            return f"{sandbox.kind} does not end within 30 s"
    lines = errors.decode(errors="replace").strip().splitlines()
    return "" if process.returncode == 0 else f"{sandbox.kind} reports: {lines[-1] if lines else process.returncode}"


@contextmanager
def confined(
    main: ModuleType,
    sandbox: Sandbox,
    limits: SandboxLimits,
    with_modules: tuple[ModuleType, ...] = (),
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a sandboxed Python process that runs `main.main`. All its processes are dead when the block ends.

    Args:
        main: a module of `inside/`.
        sandbox: from `find`.
        limits: limits of the process.
        with_modules: modules of `inside/` that `main` imports, besides `limits`.
        stdin, stdout, stderr: as for subprocess.Popen.
    """
    with (
        tempfile.TemporaryDirectory(prefix="rloo-code-") as scratch,
        subprocess.Popen(
            [*interpreter_argv(sandbox, limits), *python_arguments(sandbox, main, limits, with_modules)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=scratch,
            env=environment(),
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            end(process, sandbox.kind == "apptainer")


def end(process: subprocess.Popen[bytes], apptainer: bool) -> None:
    """Kills a process that has its own session, and its children, even if it has already exited."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if apptainer:  # the process that serves the image's files has its own group and outlives the others
        for pid in (int(folder.name) for folder in Path("/proc").glob("[0-9]*")):
            with suppress(ProcessLookupError, PermissionError):  # it has exited meanwhile, or belongs to another user
                if os.getsid(pid) == process.pid:
                    os.kill(pid, signal.SIGKILL)
