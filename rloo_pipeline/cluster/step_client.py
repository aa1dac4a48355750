"""The shell of stages in a multi-node job or in an image. A host runs the command; if none can, srun or a shell does.

Called as `python step_client.py srun OPTIONS sh -c SCRIPT sh -c COMMAND`, or with `bash -c COMMAND` for a short stage
that stays on this node (`snakemake_ext/steps.py` writes the calling scripts). It asks the router in Snakemake's process
(`node_stages.py`) for a node. Since it starts with every stage, it imports only the standard library.
"""

import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

ROUTER = "RLOO_ROUTER"
"""Environment variable with the router's socket. Without it, srun runs all commands."""
IMAGE = "RLOO_IMAGE"
"""Environment variable with the image in which hosts and ranks run. Without it, they run in this interpreter's
environment.
"""
PASSED = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
"""Variables that Snakemake sets for a job, in addition to those for the number of threads."""


def main(shell: Sequence[str]) -> None:
    """Runs a stage's command and exits with its status.

    Args:
        shell: srun with options and command; for a short stage, a shell on this node with the command.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Ctrl-C ends this process without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = {name: value for name, _, value in (word.partition("=") for word in shell) if name.startswith("--")}
    by_srun = shell[0] == "srun"
    request = {
        "command": inner(shell[-1], os.environ.get(IMAGE)),
        "variables": {name: os.environ[name] for name in os.environ if name in PASSED or name.endswith("_NUM_THREADS")},
        "threads": int(options.get("--cpus-per-task", 0)),
        "gpu": by_srun and options.get("--gres") != "none",
        "node": options.get("--nodelist") if by_srun else os.environ.get("SLURMD_NODENAME"),
    }
    place = []
    if ROUTER in os.environ:
        connection = _connected(os.environ[ROUTER])
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = _answer(connection)
        if answer["code"] is not None:
            raise SystemExit(answer["code"])
        place = [f"--nodelist={answer['node']}"] if answer["node"] and by_srun else []
        os.set_inheritable(connection.detach(), True)  # holds the place on the node until the exec'ed program ends
    os.execvp(shell[0], [shell[0], *place, *shell[1:]])


def _connected(path: str) -> socket.socket:
    """Connects to a Unix socket through a short path, since the kernel allows at most 107 characters."""
    folder = os.open(os.path.dirname(path), os.O_PATH)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    os.close(folder)
    return connection


def inner(command: str, image: str | None) -> str | None:
    """The part of a command that runs in the image, or all of it without an image; None if it runs in another image."""
    if image is None:
        return command
    try:
        words = shlex.split(command)
    except ValueError:  # an apostrophe in a comment of a user's own rule, which runs without the image
        return None
    return words[-1] if words[-2:-1] == ["-c"] and image in words else None


def _answer(connection: socket.socket) -> Mapping[str, Any]:
    """Waits for the router's answer, {"code", "node"}, and prints the stage's output to the terminal until then.

    Raises:
        SystemExit: with status 1 if Snakemake has ended, since then nobody waits for the stage.
    """
    with suppress(ConnectionError), connection.makefile() as lines:
        for line in lines:
            answer: Mapping[str, Any] = json.loads(line)
            if "text" not in answer:
                return answer
            sys.stderr.write(answer["text"])
            sys.stderr.flush()
    raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
