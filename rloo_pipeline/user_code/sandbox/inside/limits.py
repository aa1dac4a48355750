"""The last steps of confinement, which the sandboxed process takes itself before it reads a program.

It limits the number of files in /tmp (a mount option that bubblewrap does not set), drops the capability needed for
that, sets resource limits, switches to an unused uid if it started as real root (the kernel exempts root from the
process limit), and installs a system call filter. The filter denies calls that no solution needs and that namespaces do
not cover: sockets (vsock crosses a network namespace), keyrings, kernel memory that no limit counts, and the calls
behind most kernel vulnerabilities (user namespaces, mounts, io_uring, bpf, ptrace). To a program, calls newer than this
list do not exist.

If a parent dies right after starting a process, nothing kills that process. So each process first arranges to die with
its parent, then writes `READY`, gets its program only after that, and waits for it for a limited time.
"""

import ctypes
import os
import resource
import signal
import struct
from pathlib import Path
from typing import Any

DENIED = (
    *(101, 310, 311, 312, 438),  # ptrace and other processes' memory
    *(41, 54),  # sockets and their buffers
    *(155, 161, 165, 166, 272, 303, 304, 308, 428, 429, 430, 431, 432, 433, 442),  # namespaces and mounts
    *(248, 249, 250),  # keyrings
    *(29, 64, 68, 240),  # System V's memory, semaphores and queues, and POSIX message queues
    *(319, 447),  # in-memory files
    *(206,),  # asynchronous I/O
    *(188, 189, 190),  # extended attributes
    *(253, 294, 300),  # file events
    *(444, 445, 446),  # Landlock
    *(237, 238, 256, 279, 450),  # memory policy
    *(298, 321, 323, 425, 426, 427),  # perf, bpf, userfaultfd, io_uring
)
"""x86-64 numbers of the denied system calls."""
PROCESS_GROUPS = (109, 112)
NEWEST = 450
"""The newest system call that was reviewed for this list."""
CLONE, CLONE3, CLONE_NEWUSER = 56, 435, 0x10000000

LOAD, EQUALS, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, UNKNOWN = 0x7FFF0000, 0x00050001, 0x00050026  # ENOSYS makes libc fall back from clone3 to clone
X86_64 = 0xC000003E
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
MS_REMOUNT_NOSUID_NODEV = ctypes.c_ulong(0x20 | 0x2 | 0x4)
CAPABILITY_VERSION = 0x20080522
READY = b"\n"
WAITING_SECONDS = 60


def apply(limits: dict[str, int]) -> None:
    """Sets all limits. Raises if one cannot be set, so that nothing runs unlimited."""
    signal.alarm(WAITING_SECONDS)
    if limits["files"]:
        _call("mount", b"tmpfs", b"/tmp", None, MS_REMOUNT_NOSUID_NODEV, b"nr_inodes=%d" % limits["files"])
    if limits["uid"]:
        Path("/tmp").chmod(0o1777)
        os.setgroups([])
        os.setresgid(limits["uid"], limits["uid"], limits["uid"])
        os.setresuid(limits["uid"], limits["uid"], limits["uid"])
    _call("prctl", PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    _call("capset", struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24))
    for kind, most in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file_size"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),  # also limits timers
    ):
        _, ceiling = resource.getrlimit(kind)
        most = most if ceiling == resource.RLIM_INFINITY else min(most, ceiling)
        resource.setrlimit(kind, (most, most))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.uname().machine == "x86_64":
        _refuse_system_calls()


def begin() -> None:
    """Ends the limited wait for the program; from here on, the parent enforces the deadline."""
    signal.alarm(0)


def stay_in_group() -> None:
    """Makes it impossible to leave the process group and session, so that a signal to the group reaches every process
    in it. For x86-64 only.
    """
    if os.uname().machine == "x86_64":
        _refuse_system_calls(PROCESS_GROUPS)


def _refuse_system_calls(denied: tuple[int, ...] = DENIED) -> None:
    code = _filter(denied)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    none = ctypes.c_ulong(0)
    _call("prctl", PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(program), none, none)


def _call(name: str, *args: Any) -> None:
    """Calls a function of the C library; raises OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args):
        raise OSError(ctypes.get_errno(), f"the kernel refuses {name}")


def _filter(denied: tuple[int, ...]) -> bytes:
    """The filter as an array of struct sock_filter, each an operation, two jump offsets and a number."""
    allow = 6 + len(denied) + 3
    refuse, unknown = allow + 1, allow + 2

    def step(at: int, operation: int, number: int, then: int = 0, other: int = 0) -> bytes:
        return struct.pack("HBBI", operation, then and then - at - 1, other and other - at - 1, number)

    lines = [
        step(0, LOAD, 4),  # the architecture
        step(1, EQUALS, X86_64, other=refuse),
        step(2, LOAD, 0),  # the system call's number
        step(3, AT_LEAST, 0x40000000, then=refuse),  # system call numbers of the x32 ABI
        step(4, EQUALS, CLONE3, then=unknown),
        step(5, AT_LEAST, NEWEST + 1, then=unknown),
        *(step(6 + row, EQUALS, number, then=refuse) for row, number in enumerate(denied)),
        step(allow - 3, EQUALS, CLONE, other=allow),
        step(allow - 2, LOAD, 16),  # lower half of clone's flags
        step(allow - 1, HAS_BITS, CLONE_NEWUSER, then=refuse),
        step(allow, RETURN, ALLOW),
        step(refuse, RETURN, REFUSE),
        step(unknown, RETURN, UNKNOWN),
    ]
    return b"".join(lines)
