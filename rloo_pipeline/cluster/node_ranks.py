"""Ranks on several nodes of a SLURM job that stay alive for the next stage, like `kept_ranks` on one machine.

Their worker runs outside the image, on the first node, and srun starts the image once per rank. srun passes the
worker's requests to the standard input of all ranks and merges their output: the rest of a line after a null byte is an
answer, and everything else goes to the stage's log. If a rank dies, srun ends the others. If the worker or srun dies,
the ranks' input ends and they exit.
"""

import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rloo_pipeline.cluster import nodes
from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.workers import kept_ranks

MARK = b"\0"
"""Marks the start of an answer in the merged output."""


class NodeRanks(kept_ranks.KeptRanks):
    """Ranks on several nodes that wait for stages."""

    def __init__(self, layout: nodes.RankLayout, output: Path) -> None:
        """Starts the ranks. Arguments are as for `nodes.prepare`.

        Raises:
            UserError: this is not a SLURM job.
            IncompatibleEngine: srun is not installed.
        """
        self.count = layout.processes
        self._step = nodes.prepare(layout, output, ["worker", "--rank"], ["--quiet", "--overlap", "--mem=0"])
        self.failed = self._step.failed
        environment = self._step.environment.items()
        try:
            self._srun = subprocess.Popen(
                self._step.command,
                env={name: value for name, value in environment if not name.startswith("SLURM_MEM_PER_")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,  # unbuffered, because `select` would not see buffered lines
            )
        except FileNotFoundError:
            self._step.remove_files()
            raise IncompatibleEngine("ranks that did not start") from None
        print(f"{layout.processes} ranks on {layout.nodes} nodes start", flush=True)

    def _send(self, text: bytes, descriptors: tuple[int, int]) -> None:  # noqa: ARG002 - ranks write to srun's output
        assert self._srun.stdin
        self._srun.stdin.write(text)

    def _next(self, patience: float | None) -> list[bytes]:
        assert self._srun.stdout
        while select.select([self._srun.stdout], [], [], patience)[0]:
            said, mark, answer = (line := self._srun.stdout.readline()).partition(MARK)
            os.write(1, said)
            if mark or not line or nodes.KILLED.match(said):
                return [answer]
        return []

    def close(self) -> None:
        """Ends the ranks and waits for them to exit."""
        assert self._srun.stdin
        self._srun.stdin.close()
        self._srun.terminate()  # srun forwards the signal to ranks, which may be busy
        try:
            self._srun.wait(kept_ranks.KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._srun.kill()
            self._srun.wait()
        self._step.remove_files()


def serve(run_command: Callable[[list[str]], int]) -> None:
    """Serves requests from standard input in a rank that `NodeRanks` started. Exits when the input ends.

    Args:
        run_command: runs `rloo` with these arguments and returns its exit status.
    """
    requests = queue.SimpleQueue[bytes]()
    answers = os.dup(1)
    os.dup2(1, 2)  # a single stream, since srun merges one stream per rank

    def read() -> None:
        while line := sys.stdin.buffer.readline():
            requests.put(line)
        os._exit(0)  # even in the middle of a stage, since nobody is waiting for its result

    threading.Thread(target=read, daemon=True).start()

    def receive() -> tuple[bytes, list[int]]:
        return requests.get(), [os.dup(answers), os.dup(answers)]

    kept_ranks.answer_all(run_command, receive, lambda answer: os.write(answers, MARK + answer))
