"""How a stage hands itself to a worker, if there is one that is free; else it does its work itself.

A worker listens on the Unix socket ROLE-N.sock of the folder that RLOO_WORKERS names, which belongs to the user alone
(mode 0700). Whoever holds the lock on ROLE-N.lock may talk to it: the kernel gives it back when a stage is killed. The
request is a line of JSON, {"words", "folder", "started"}, along with the terminal's file descriptor; the answer is
{"code"}, or nothing where the worker died or is not one for this stage.

Nothing but the standard library is imported, so that a stage whose work a worker does costs next to nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

FOLDER = "RLOO_WORKERS"
ROLES = {
    "probe": "sampler",
    "rollout": "sampler",
    "evaluate": "sampler",
    "checks": "reader",
    "reference": "reader",
    "distance": "reader",
    "update": "trainer",
    "score": "clerk",
    "gate": "clerk",
}
"""Which worker does a stage: vLLM; a model that is read; a model that is trained; libraries alone."""


def ask(words: Sequence[str]) -> int | None:
    """Has a worker run `rloo WORDS`: the exit status, or None where no worker did it."""
    role = ROLES.get(words[0]) if words else None
    if role is None or FOLDER not in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    for path in sorted(Path(os.environ[FOLDER]).glob(f"{role}-*.sock")):
        with path.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return _request(path, words)
            except OSError:  # busy, or gone
                continue
    return None


@contextmanager
def short(path: Path) -> Iterator[str]:
    """Another name of a socket, since 107 characters are the most that a socket's may have."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _request(path: Path, words: Sequence[str]) -> int | None:
    with socket.socket(socket.AF_UNIX) as line, short(path) as name:
        line.connect(name)
        text = json.dumps({"words": list(words), "folder": os.getcwd(), "started": time.time()})
        socket.send_fds(line, [text.encode() + b"\n"], [2])
        answer = b"".join(iter(lambda: line.recv(4096), b""))
    return int(json.loads(answer)["code"]) if answer else None
