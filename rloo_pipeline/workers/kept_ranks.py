"""The ranks of a worker whose stages use several: one torchrun starts them, and they stay for the next stage.

The worker runs a stage as it would without kept ranks, up to the point where it would start them. Each rank has a
connection to the worker (over several nodes, they share one through srun: `cluster/node_ranks.py`). A request is a line
of JSON with two descriptors, of the log and of the terminal: {"words", "folder", "fence", "run", "started"} for a
stage, or {"write": true} for the trainer state that the last stage has left to write, which all ranks write together.
The answer is {"code", "kept", "later"}: the exit status (null if the engine does not fit the stage), true if the rank
keeps an engine and has left the GPU, and the state that it can write.

If a rank dies, all are ended, and the stage does its work itself. If one fails, all are ended, since the others may
wait for it in a collective operation. A rank ends with its worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rloo_pipeline.artifacts import fence
from rloo_pipeline.config import JSON
from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.runtime import controller_watch, cost, devices, output, process_end, progress, ranks
from rloo_pipeline.workers import client, engine_cache

START_SECONDS = 300.0
"""Time limit for all ranks to connect; before that, they import next to nothing."""
BEHIND_SECONDS = 1800.0
"""Longest time between the first rank's answer and the last one's, like the limit of a collective operation."""
KILL_SECONDS = 10.0
"""Longest wait for a killed rank: the kernel may hold it while a file system or a driver does not answer."""
GRACE = 1.0
"""Seconds to wait after a failure, in case it turns out that another rank died and caused it."""

_kept: KeptRanks | None = None


def run(count: int, words: Sequence[str], start: Callable[[], KeptRanks] | None = None) -> None:
    """Runs `rloo WORDS` on the ranks that this worker keeps; starts them if there are none.

    Args:
        count: number of ranks.
        words: the stage's arguments.
        start: starts the ranks, by default on this machine.

    Raises:
        UserError: a rank failed.
        IncompatibleEngine: a rank died, or keeps an engine that does not fit.
    """
    global _kept
    if _kept is not None and _kept.count != count:
        close()
    _kept = _kept or (start() if start else KeptRanks(count))
    try:
        answers = _kept.run(words)
    except BaseException:
        close()
        raise
    if not all(answer.kept for answer in answers):
        close()  # no engine stays, or one that cannot leave the GPU
    elif target := answers[0].later:
        engine_cache.write_later(_write, Path(target))


def close() -> None:
    """Ends the ranks, if there are any."""
    global _kept
    if _kept is not None:
        _kept.close()
        _kept = None


def _write(_: Path) -> None:
    """Makes the ranks write the trainer state that the last stage has left."""
    assert _kept is not None
    try:
        _kept.ask({"write": True}, (1, 2))
    except (UserError, IncompatibleEngine) as error:
        close()
        raise RuntimeError(f"{error}, so the ranks are restarted") from error


class RankAnswer(NamedTuple):
    """A rank's answer to a request."""

    code: int | None
    kept: bool = False
    later: str | None = None


class KeptRanks:
    """Ranks that wait for stages."""

    def __init__(self, count: int) -> None:
        """Starts `count` ranks.

        Raises:
            IncompatibleEngine: the ranks do not connect.
        """
        self.count = count
        self._folder = tempfile.TemporaryDirectory(prefix="rloo-ranks-", ignore_cleanup_errors=True)
        environment = ranks.torchrun_environment(Path(self._folder.name))
        self.failed = Path(environment[ranks.FAILED])
        self._connections: list[socket.socket] = []
        path = self.failed.with_name("ranks.sock")
        arguments = ["worker", "--rank", "--socket", str(path), "--controller", str(os.getpid())]
        with socket.socket(socket.AF_UNIX) as listener:
            client.with_short_path(listener.bind, str(path))
            listener.listen(count)
            listener.settimeout(0.2)
            self._torchrun = subprocess.Popen(
                ranks.torchrun_command(count, arguments), env=os.environ | environment, stdin=subprocess.DEVNULL
            )
            self._processes = [psutil.Process(self._torchrun.pid)]
            self._torchrun_end = process_end.readable_after(self._torchrun.pid)
            began = time.monotonic()
            try:
                self._accept(listener)
            except BaseException:
                self.close()
                raise
        print(f"{count} ranks started in {time.monotonic() - began:.1f} s", flush=True)
        cost.count_processes(self._processes)

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_SECONDS
        while len(self._connections) < self.count:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._torchrun.poll() is not None or time.monotonic() > deadline:
                    raise IncompatibleEngine("ranks that did not start") from None
                continue
            process, user = client.peer(connection)
            if user != os.getuid():
                connection.close()
                continue
            self._connections.append(connection)
            with contextlib.suppress(psutil.NoSuchProcess):  # it has died, as its connection will show
                self._processes.append(psutil.Process(process))

    def run(self, words: Sequence[str]) -> list[RankAnswer]:
        """Runs `rloo WORDS` on all ranks, which write to the log of this process.

        Raises:
            UserError: a rank failed.
            IncompatibleEngine: a rank died, or keeps an engine that does not fit.
        """
        self.failed.unlink(missing_ok=True)
        stage = {"words": list(words), "folder": os.getcwd(), "fence": os.environ.get(fence.VARIABLE)}
        return self.ask(stage | {"run": progress.run, "started": time.time()}, (1, progress.console.file.fileno()))

    def ask(self, request: JSON, descriptors: tuple[int, int]) -> list[RankAnswer]:
        """Sends a request to all ranks and waits for their answers; raises the same errors as `run`."""
        try:
            self._send(json.dumps(request).encode() + b"\n", descriptors)
        except OSError:
            raise IncompatibleEngine("a rank that has died") from None
        answers = self._answers()
        if any(answer.code is None for answer in answers):
            raise IncompatibleEngine("ranks with another engine")
        ranks.refuse_failed(f"{self.count} ranks", self.failed, max(answer.code or 0 for answer in answers))
        return answers

    def _send(self, text: bytes, descriptors: tuple[int, int]) -> None:
        """Sends a line to all ranks."""
        for connection in self._connections:
            socket.send_fds(connection, [text], descriptors)
        self._waiting = list(self._connections)

    def _next(self, patience: float | None) -> list[bytes]:
        """The next answers; none if none arrives within that many seconds; an empty one if a rank has died,
        or torchrun, without which ranks would wait for each other for long.
        """
        watched: list[Any] = [*self._waiting, self._torchrun_end]
        ready, _, _ = select.select(watched, [], [], patience)
        if self._torchrun_end in ready:
            return [b""]
        self._waiting = [connection for connection in self._waiting if connection not in ready]
        return [client.receive(connection)[0] for connection in ready]

    def _answers(self) -> list[RankAnswer]:
        """The answers of all ranks, in their order; incomplete if one has failed.

        Raises:
            IncompatibleEngine: a rank has died, or does not answer.
        """
        answers = dict[int, RankAnswer]()
        while len(answers) < self.count:
            failed = any(answer.code != 0 for answer in answers.values())
            patience = GRACE if failed else BEHIND_SECONDS if answers else None
            arrived = self._next(patience)
            if not arrived and failed:
                break
            if not arrived:
                raise IncompatibleEngine("a rank that does not answer")
            for text in arrived:
                if not text:
                    raise IncompatibleEngine("a rank that has died")
                number, *answer = json.loads(text)
                answers[number] = RankAnswer(*answer)
        return [answers[number] for number in sorted(answers)]

    def close(self) -> None:
        """Kills the ranks and waits until they have ended."""
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._torchrun.wait()
        for process in self._processes:
            process_end.wait(process.pid, KILL_SECONDS)  # its parent may not reap it
        for connection in self._connections:
            connection.close()
        os.close(self._torchrun_end)
        self._folder.cleanup()
        cost.count_processes([])


def serve(run_command: Callable[[list[str]], int], path: Path, worker: int) -> None:
    """Serves the requests of a worker as one of its ranks; ends with it.

    Args:
        run_command: runs `rloo` with these arguments and returns its exit status.
        path: socket on which the worker listens.
        worker: process id of the worker.
    """
    controller_watch.end_with(worker, lambda: os._exit(1))
    with socket.socket(socket.AF_UNIX) as connection:
        client.with_short_path(connection.connect, str(path))
        answer_all(run_command, lambda: client.receive(connection), connection.sendall)


def answer_all(
    run_command: Callable[[list[str]], int],
    receive: Callable[[], tuple[bytes, list[int]]],
    send: Callable[[bytes], object],
) -> None:
    """Answers requests until an empty one.

    Args:
        run_command: as for `serve`.
        receive: returns the next request with its descriptors.
        send: sends an answer.
    """
    engine_cache.enable()
    while (request := receive())[0]:
        text, descriptors = request
        stage = json.loads(text)
        answer = _write_state(*descriptors) if "write" in stage else _run(run_command, stage, *descriptors)
        send(json.dumps([ranks.current().number, *answer]).encode() + b"\n")


def _run(run_command: Callable[[list[str]], int], request: JSON, log: int, terminal: int) -> RankAnswer:
    """Runs a stage on this rank."""
    os.chdir(request["folder"])
    if ranks.RENDEZVOUS not in os.environ:  # otherwise the descriptor belongs to another node
        os.environ[progress.TERMINAL] = f"/proc/self/fd/{terminal}"
    os.environ[progress.RUN] = request["run"]
    os.environ |= {fence.VARIABLE: request["fence"]} if request["fence"] else {}
    engine_cache.forget_pending()  # the worker decided that it was not due
    try:
        with output.standard_output_to(log):
            cost.begin(request["started"])
            code = run_command(request["words"])
            kept = code == 0 and engine_cache.holds_engine() and (not devices.has_gpu() or engine_cache.leave_gpu())
    except IncompatibleEngine:
        return RankAnswer(None)
    finally:
        os.close(terminal)
        os.environ.pop(fence.VARIABLE, None)
    pending = engine_cache.target()
    return RankAnswer(code, kept, str(pending) if pending else None)


def _write_state(log: int, terminal: int) -> RankAnswer:
    """Writes this rank's part of the trainer state that the last stage left."""
    os.close(terminal)
    with output.standard_output_to(log):
        try:
            engine_cache.write_now()
        except Exception as error:
            ranks.tell_launcher(str(error))
            return RankAnswer(1)
    return RankAnswer(0, True)
