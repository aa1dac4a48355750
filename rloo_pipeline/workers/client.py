"""How a stage hands itself to a worker, if there is one that is free; else it does its work itself.

A worker listens on the Unix socket ROLE-N.sock of the folder that RLOO_WORKERS names, which belongs to the user alone
(mode 0700). Whoever holds the lock on ROLE-N.lock may talk to it: the kernel gives it back when a stage is killed. The
request is a line of JSON, {"words", "folder", "started"}, along with the terminal's file descriptor; the answer is
{"code"}, or nothing where the worker died or is not one for this stage.

A stage whose work a worker does costs little more than its interpreter's start: the folder's `bin/rloo` runs this file
by itself, in one that looks for no packages. So nothing is imported but the standard library, and little of that.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence

FOLDER = "RLOO_WORKERS"
BIN = "bin"
"""The folder in it with the `rloo` that a run's jobs find on their PATH."""
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


def main() -> None:
    """`client.py RLOO STAGE …`, as jobs call it: by a worker, else by the program RLOO, which need not ask again."""
    program, *words = sys.argv[1:]
    code = ask(words)
    if code is not None:
        raise SystemExit(code)
    os.environ.pop(FOLDER, None)
    os.execv(program, [program, *words])


def ask(words: Sequence[str]) -> int | None:
    """Has a worker run `rloo WORDS`: the exit status, or None where no worker did it."""
    role = ROLES.get(words[0]) if words else None
    if role is None or FOLDER not in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    for name in _listening(os.environ[FOLDER], role):
        with open(f"{name}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return _request(f"{name}.sock", words)
            except OSError:  # busy, or gone
                continue
    return None


def _listening(folder: str, role: str) -> list[str]:
    """Paths of the workers of a role, without the end."""
    try:
        files = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    return [os.path.join(folder, file[:-5]) for file in files if file.startswith(f"{role}-") and file.endswith(".sock")]


def _request(path: str, words: Sequence[str]) -> int | None:
    with socket.socket(socket.AF_UNIX) as line:
        reach(line.connect, path)
        text = json.dumps({"words": list(words), "folder": os.getcwd(), "started": time.time()})
        socket.send_fds(line, [text.encode() + b"\n"], [2])
        answer = b"".join(iter(lambda: line.recv(4096), b""))
    return int(json.loads(answer)["code"]) if answer else None


def reach(use: Callable[[str], object], path: str) -> None:
    """Has a socket connect or bind by another name of a path, since 107 characters are the most that one may have."""
    folder = os.open(os.path.dirname(path), os.O_PATH)
    try:
        use(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)


if __name__ == "__main__":
    main()
