"""How a stage is handed to a worker, if there is one that is free; else it does its work itself.

A worker listens on the Unix socket ROLE-N.sock of the folder that RLOO_WORKERS names, which belongs to the user alone
(mode 0700). Whoever holds the lock on ROLE-N.lock may talk to it: the kernel gives it back when a stage is killed. The
request is a line of JSON, {"words", "folder", "started"}, along with the terminal's file descriptor; the answer is
{"code"}, or nothing where the worker died or is not one for this stage.

`rloo STAGE …` asks before it imports anything else: nothing is imported here but the standard library, and little of
that.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Sequence

FOLDER = "RLOO_WORKERS"
ROLES = {
    "probe": "sampler",
    "rollout": "sampler",
    "evaluate": "sampler",
    "checks": "logprobs",
    "reference": "logprobs",
    "distance": "logprobs",
    "update": "trainer",
    "score": "scorer",
    "gate": "scorer",
}
"""Which worker does a stage: vLLM; a model that is read; a model that is trained; libraries alone."""
PATIENCE = {"sampler": 10.0, "logprobs": 3.0, "trainer": 3.0, "scorer": 1.0}
"""Seconds for which a stage waits for a worker that is busy: about what its own engine would take to start, so that it
never loses more by waiting than as much again.
"""


def run_stage(argv: Sequence[str]) -> int | None:
    """Has a worker run `rloo ARGV`.

    Returns:
        The exit status; None where no worker did it, so that the stage does its work itself.
    """
    role = ROLES.get(argv[0]) if argv else None
    if role is None or FOLDER not in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    connected = _connect(role, argv)
    if connected is None:
        return None
    lock, connection = connected
    try:
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    except OSError:
        answer = b""
    finally:  # closed before there is an answer, it ends the worker
        connection.close()
        os.close(lock)
    if not answer and not os.path.isdir(os.environ[FOLDER]):
        return 1  # workers remove it when the Snakemake that started them has ended: nobody waits for this stage
    return int(json.loads(answer)["code"]) if answer else None


def _connect(role: str, argv: Sequence[str]) -> tuple[int, socket.socket] | None:
    """Sends a request to a worker of a role.

    Returns:
        The descriptor of the worker's lock, and the connection; None where no worker is free within PATIENCE.
    """
    deadline = time.monotonic() + PATIENCE[role]
    while True:
        busy = False
        for name in _listening(os.environ[FOLDER], role, _shard(argv)):
            lock = os.open(f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock, _request(f"{name}.sock", argv)
            except OSError as error:  # BlockingIOError where it is busy, else it is gone
                os.close(lock)
                busy = busy or isinstance(error, BlockingIOError)
        if not busy or time.monotonic() > deadline:
            return None
        time.sleep(0.02)


def _shard(words: Sequence[str]) -> int:
    """The shard of the table that a stage writes; 0 where it writes another thing."""
    output = words[words.index("--output") + 1] if "--output" in words[:-1] else ""
    name, end = os.path.splitext(os.path.basename(output))
    return int(name) if end == ".parquet" and name.isdigit() else 0


def _listening(folder: str, role: str, shard: int) -> list[str]:
    """Paths of the workers of a role, without the end; the same one comes first for the same shard in every round."""
    try:
        files = sorted(file for file in os.listdir(folder) if file.startswith(f"{role}-") and file.endswith(".sock"))
    except FileNotFoundError:
        return []
    names = [os.path.join(folder, file[:-5]) for file in files]
    first = shard % len(names) if names else 0
    return names[first:] + names[:first]


def _request(path: str, words: Sequence[str]) -> socket.socket:
    line = socket.socket(socket.AF_UNIX)
    try:
        with_short_path(line.connect, path)
        text = json.dumps({"words": list(words), "folder": os.getcwd(), "started": time.time()})
        socket.send_fds(line, [text.encode() + b"\n"], [2])
    except OSError:
        line.close()
        raise
    return line


def with_short_path(use: Callable[[str], object], path: str) -> None:
    """Has a socket connect or bind by another name of a path, since 107 characters are the most that one may have."""
    folder = os.open(os.path.dirname(path), os.O_PATH)
    try:
        use(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
