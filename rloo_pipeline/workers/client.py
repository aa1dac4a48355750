"""Runs a stage on a warm worker, if one is free.

A worker listens on the Unix socket ROLE-N.sock in the folder that RLOO_WORKERS names, which only the user can enter
(mode 0700). Only the holder of the lock on ROLE-N.lock may talk to the worker; the kernel releases it when a stage is
killed. The file names the run and the command that the worker served last; other runs of an experiment try that worker
last. The request is a line of JSON, {"words", "folder", "started"}, sent with the file descriptor of the terminal.
The answer is {"code"}, or nothing if the worker died. The code is null if the worker holds an engine that does not fit
the stage: it restarts, and the stage waits for that.

`rloo STAGE …` looks for a worker before it imports anything else, so this module imports only the standard library, and
few modules of that.
"""

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence

from rloo_pipeline.stages.table import ROWS

FOLDER = "RLOO_WORKERS"
CALL_MODEL = "call-model"
"""Command by which a stage lets a worker call a reward model (`kept_models`)."""
ROLES = {row.stage: row.worker for row in ROWS if row.worker} | {CALL_MODEL: "scorer"}
"""Worker role of each command that can run in a worker."""
OF_A_RANK = ("TORCHELASTIC_RUN_ID", "RLOO_MEETING")
"""Environment variables of ranks (`runtime.ranks.is_rank`)."""
PATIENCE = {"sampler": 10.0, "logprobs": 3.0, "trainer": 3.0, "scorer": 10.0, "observer": 10.0}
"""Seconds that a stage waits for a busy worker: about as long as an engine of its own takes to start, so that waiting
at most doubles that time.
"""
MODEL_PATIENCE = 120.0
"""Seconds that a call of a reward model waits for a busy worker, or a stage for a worker that makes one for the same
run: about as long as a large model takes to load, since each of the two would load it.
"""


def run_stage(
    argv: Sequence[str], terminal: int = 2, connected: Callable[[socket.socket], object] = lambda _: None
) -> int | None:
    """Runs `rloo ARGV` on a worker.

    Args:
        argv: arguments after `rloo`.
        terminal: descriptor of the stage's terminal.
        connected: called with the connection; closing it ends the stage.

    Returns:
        The exit status; None if no worker ran it, so that this process must.
    """
    role = ROLES.get(argv[0]) if argv else None
    if role is None or FOLDER not in os.environ or any(name in os.environ for name in OF_A_RANK):
        return None
    answer = _ask(role, argv, terminal, connected, restarts=False)
    if answer == {"code": None}:
        answer = _ask(role, argv, terminal, connected, restarts=True)
    return answer.get("code")


def _ask(
    role: str, argv: Sequence[str], terminal: int, connected: Callable[[socket.socket], object], restarts: bool
) -> dict[str, int | None]:
    """A worker's answer; empty if there is none. For the arguments, see `run_stage` and `_connect`."""
    chosen = _connect(role, argv, terminal, restarts)
    if chosen is None:
        return {}
    lock, connection = chosen
    connected(connection)
    try:
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    except OSError:
        answer = b""
    finally:  # closing the connection before the answer ends the worker
        connection.close()
        os.close(lock)
    if not answer and not os.path.isdir(os.environ[FOLDER]):
        return {"code": 1}  # workers remove the folder when Snakemake has ended, so nobody waits for this stage
    return dict(json.loads(answer)) if answer else {}


def _connect(role: str, argv: Sequence[str], terminal: int, restarts: bool) -> tuple[int, socket.socket] | None:
    """Sends a request to a worker of a role.

    Args:
        role: the role.
        argv: arguments after `rloo`.
        terminal: descriptor of the stage's terminal.
        restarts: True if a worker has just said that it restarts, and so listens again soon.

    Returns:
        The descriptor of the worker's lock, and the connection; None if no worker is free within PATIENCE, or
        MODEL_PATIENCE.
    """
    began, run = time.monotonic(), _run_of(argv)
    while True:
        busy, patience = restarts, MODEL_PATIENCE if argv[0] == CALL_MODEL else PATIENCE[role]
        names = _listening(os.environ[FOLDER], role)
        last = {name: _last_request(name) for name in names}
        for name in sorted(names, key=lambda name: (last[name][0] != run, last[name][0] != "")):
            try:
                lock = os.open(f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:  # the workers have ended and removed their folder
                return None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{run}\n{argv[0]}".encode(), 0)
                return lock, _request(f"{name}.sock", argv, terminal)
            except OSError as error:  # BlockingIOError: the worker is busy; any other: it is gone
                os.close(lock)
                if isinstance(error, BlockingIOError):
                    of_run, command = last[name]
                    loads = command == CALL_MODEL and f"{of_run} ".startswith(f"{run} ")  # a model's name follows
                    busy, patience = True, MODEL_PATIENCE if loads else patience
        if not busy or time.monotonic() > began + patience:
            return None
        time.sleep(0.02)


def _run_of(argv: Sequence[str]) -> str:
    """The folder of the run that a stage writes to, taken from a path in its arguments; one run's in an experiment. A
    reward that runs alone has its own engine, so its name follows.
    """
    output, only = (argv[argv.index(name) + 1] if name in argv[:-1] else "" for name in ("--output", "--only"))
    for folder in ("/rounds/", "/policies/", "/evaluation/", "/warmstart/"):
        output = output.partition(folder)[0]
    return f"{output} {only}".rstrip()


def _last_request(name: str) -> tuple[str, str]:
    """The run that a worker served last, whose engines it holds, and the command; empty if there is none."""
    try:
        with open(f"{name}.lock", encoding="utf-8") as lock:
            run, _, command = lock.read().partition("\n")
            return run, command
    except OSError:
        return "", ""


def listens(role: str) -> bool:
    """True if this process may use workers, and there is one of this role."""
    return FOLDER in os.environ and bool(_listening(os.environ[FOLDER], role))


def _listening(folder: str, role: str) -> list[str]:
    """Socket paths of a role's workers without `.sock`."""
    try:
        files = sorted(file for file in os.listdir(folder) if file.startswith(f"{role}-") and file.endswith(".sock"))
    except FileNotFoundError:
        return []
    return [os.path.join(folder, file[:-5]) for file in files]


def _request(path: str, argv: Sequence[str], terminal: int) -> socket.socket:
    """Connects to a worker and sends the request."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with_short_path(connection.connect, path)
        text = json.dumps({"words": list(argv), "folder": os.getcwd(), "started": time.time()})
        socket.send_fds(connection, [text.encode() + b"\n"], [terminal])
    except OSError:
        connection.close()
        raise
    return connection


def peer(connection: socket.socket) -> tuple[int, int]:
    """Asks the kernel for the ids of the process at the other end and of its user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return process, user


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A line, which may arrive in several pieces, and the descriptors sent with it; empty at the end."""
    try:
        text, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 2)
        while text and not text.endswith(b"\n"):
            piece = connection.recv(1 << 20)
            text = text + piece if piece else b""
    except ConnectionResetError:  # the other end died before it had read everything
        return b"", []
    return text, descriptors


def with_short_path(use: Callable[[str], object], path: str) -> None:
    """Calls `use`, a socket's connect or bind, with a short alias of `path`: Unix sockets allow 107 characters."""
    folder = os.open(os.path.dirname(path), os.O_PATH)
    try:
        use(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
