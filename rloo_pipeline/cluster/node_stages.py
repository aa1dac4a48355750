"""Runs the stages of a multi-node job without a SLURM step for each stage: a host process on each node starts them.

With steps, each stage would start srun and the image anew, which takes half a second. Hosts are steps in the image that
stay alive (`node_workers.py`), each connected to Snakemake's process by a pipe through its srun. In that process, the
router chooses a node with free cores for each stage, sends the command to the node's host, and passes on the stage's
output and exit status. If the host dies, another one runs the command. If no host can, the stage's own process
(`step_client.py`) runs srun.

Messages are lines of JSON. To the router: {"command", "variables", "threads", "gpu", "node"}; the connection is closed
when the stage is killed. To a host: {"id", "command", "variables"}, or {"kill": id}. From a host: {"id", "text"}, and
{"id", "code"} at the end.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from rloo_pipeline.config import JSON
from rloo_pipeline.workers import client

LIMIT = 1 << 24
"""Maximum length of a message in bytes. A command with very many shards takes about a million."""
PIECE = 1 << 16
"""Maximum number of bytes of a command's output in one message."""


class Router:
    """Assigns stages to the nodes of a job."""

    def __init__(self, hosts: Mapping[str, subprocess.Popen[bytes]], cores: int, gpu_stages: int) -> None:
        """Takes the steps of the hosts by node, and the number of cores and of GPU stages per node."""
        self._nodes = [_Node(name, step, cores, gpu_stages) for name, step in hosts.items()]
        self._changed = asyncio.Condition()
        self._numbers = itertools.count()

    async def serve(self, listener: socket.socket) -> None:
        """Serves stage processes, which connect to `listener`."""
        listening = [asyncio.ensure_future(self._listen(node)) for node in self._nodes]
        # from Python 3.13 on, `start_unix_server` looks up the path by which the socket was bound, which is gone by now
        async with await asyncio.start_server(self._answer, sock=listener, limit=LIMIT) as server:
            await asyncio.gather(server.serve_forever(), *listening)

    async def _listen(self, node: _Node) -> None:
        """Passes on a host's messages until it ends."""
        assert node.step.stdout
        lines = await _reader(node.step.stdout)
        while line := await lines.readline():
            if not line.startswith(b"{"):  # the line that says it is listening, if it came late
                continue
            message = json.loads(line)
            if queue := node.messages.get(message.pop("id")):
                queue.put_nowait(message)
        node.alive = False
        for queue in node.messages.values():
            queue.put_nowait({"code": None})
        async with self._changed:
            self._changed.notify_all()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Runs a stage, and sends its process the exit status, or the request to run srun itself."""
        if not (line := await reader.readline()):
            return
        request, code = json.loads(line), None
        node = await self._placed(request)
        ended = asyncio.ensure_future(reader.read())
        with contextlib.suppress(ConnectionError):
            while node and request["command"]:
                code = await self._run(node, request, ended, writer)
                if node.alive or ended.done():
                    break
                await self._leave(node, request)
                node = await self._placed(request)
            writer.write(_line({"code": code, "node": node.name if node and node.alive else None}))
            await ended  # the stage's process or its srun has exited
        writer.close()
        if node:
            await self._leave(node, request)

    async def _leave(self, node: _Node, request: JSON) -> None:
        """Frees a stage's resources on a node."""
        async with self._changed:
            node.free(request)
            self._changed.notify_all()

    async def _placed(self, request: JSON) -> _Node | None:
        """Waits for a node with free resources for a stage; None if no node has a host."""
        async with self._changed:
            while nodes := [node for node in self._nodes if node.alive and request["node"] in (None, node.name)]:
                if fitting := [node for node in nodes if node.has_room(request)]:
                    return max(fitting, key=lambda node: (node.gpu_stages, node.cores)).take(request)
                await self._changed.wait()
        return None

    async def _run(
        self, node: _Node, request: JSON, ended: asyncio.Future[bytes], writer: asyncio.StreamWriter
    ) -> int | None:
        """Runs a stage on a node and returns its exit status; None if the host has ended. Kills the stage if its
        process has `ended`.
        """
        number = next(self._numbers)
        messages = node.messages[number] = asyncio.Queue[JSON]()
        node.send({"id": number, "command": request["command"], "variables": request["variables"]})

        def kill(_: object) -> None:
            node.send({"kill": number})

        ended.add_done_callback(kill)
        while node.alive and "code" not in (message := await messages.get()):
            writer.write(_line(message))
        ended.remove_done_callback(kill)
        del node.messages[number]
        return message["code"] if node.alive else None


class _Node:
    """A node, with its free cores and slots for GPU stages."""

    def __init__(self, name: str, step: subprocess.Popen[bytes], cores: int, gpu_stages: int) -> None:
        self.name, self.step, self.cores, self.gpu_stages = name, step, cores, gpu_stages
        self.alive = True
        self.messages = dict[int, asyncio.Queue[JSON]]()

    def has_room(self, request: JSON) -> bool:
        return bool(self.cores >= request["threads"] and self.gpu_stages >= request["gpu"])

    def take(self, request: JSON) -> _Node:
        self.cores -= request["threads"]
        self.gpu_stages -= request["gpu"]
        return self

    def free(self, request: JSON) -> None:
        self.cores += request["threads"]
        self.gpu_stages += request["gpu"]

    def send(self, message: JSON) -> None:
        assert self.step.stdin
        with contextlib.suppress(OSError):  # the host has ended; `_listen` will notice
            self.step.stdin.write(_line(message))


STAGE = re.compile(r"set -euo pipefail;\s+rloo ([\w ./:=,@%+'-]*)")
"""Matches a stage's one-line command that contains nothing a shell would expand."""
LAST_WORDS = 1.0
"""Seconds to wait for output after a stage has ended, since a process that it left behind may keep the pipe open."""


class Host:
    """Runs commands from standard input on this node until the input ends."""

    def __init__(self) -> None:
        self._ends: dict[int, Callable[[], object]] = {}
        """Functions that kill running commands, by id; those of killed or finished commands are removed."""

    async def serve(self) -> None:
        """Serves standard input."""
        requests, tasks = await _reader(sys.stdin), set[asyncio.Task[None]]()
        while line := await requests.readline():
            request = json.loads(line)
            if "kill" in request:
                self._kill(request["kill"])
                continue
            # registered here, since the next line may kill the command before its task begins
            self._ends[request["id"]] = lambda: None
            tasks.add(task := asyncio.create_task(self._run(request["id"], request)))
            task.add_done_callback(tasks.discard)
        for number in list(self._ends):
            self._kill(number)

    def _kill(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._ends.pop(number, lambda: None)()

    async def _run(self, number: int, request: JSON) -> None:
        """Runs a command in a worker if possible, which needs no new process, otherwise in a shell."""
        stage, code = STAGE.fullmatch(request["command"]), None
        try:
            if stage:
                code = await self._by_worker(number, shlex.split(stage[1]))
            if code is None and number in self._ends:
                code = await self._by_shell(number, request)
        except Exception as error:  # any exception: without an exit code the stage would never end
            _say({"id": number, "text": f"{os.environ.get('SLURMD_NODENAME')}: {error}\n"})
        self._ends.pop(number, None)
        _say({"id": number, "code": 1 if code is None else code})

    def _end_by(self, number: int, end: Callable[[], object]) -> None:
        """Stores the function that kills a running command. Calls it at once if the command was already killed."""
        killed = number not in self._ends
        self._ends[number] = end
        if killed:
            self._kill(number)

    async def _by_worker(self, number: int, words: Sequence[str]) -> int | None:
        """Runs a stage in a worker and returns its exit status; None if no worker ran it."""
        loop = asyncio.get_running_loop()

        def connected(connection: socket.socket) -> None:
            loop.call_soon_threadsafe(self._end_by, number, partial(connection.shutdown, socket.SHUT_RDWR))

        async with _output(number) as output:
            return await asyncio.to_thread(client.run_stage, words, output, connected)

    async def _by_shell(self, number: int, request: JSON) -> int:
        """Runs a command in a shell and returns its exit status; 128 plus the signal's number if it was killed."""
        variables = request["variables"]
        if temporary := variables.get("TMPDIR"):  # Snakemake created it on the first node, perhaps on a local disk
            Path(temporary).mkdir(parents=True, exist_ok=True)
        async with _output(number) as output:
            process = await asyncio.create_subprocess_exec(
                *("bash", "-c", request["command"]),
                env=os.environ | variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
            kill = partial(os.killpg, process.pid, signal.SIGKILL)
            self._end_by(number, kill)
            code = await process.wait()
            with contextlib.suppress(OSError):
                kill()  # kills processes that it left behind, as SLURM does at the end of a step
        return code if code >= 0 else 128 - code


@contextlib.asynccontextmanager
async def _output(number: int) -> AsyncIterator[int]:
    """Yields a file descriptor for a command's output, which is sent to the router."""
    reading, writing = os.pipe()
    passing_on = asyncio.create_task(_pass_on(number, await _reader(os.fdopen(reading, "rb"))))
    try:
        yield writing
    finally:
        os.close(writing)
        await asyncio.wait([passing_on], timeout=LAST_WORDS)
        passing_on.cancel()


async def _pass_on(number: int, output: asyncio.StreamReader) -> None:
    """Sends a command's output to the router until it ends, in pieces because a line can exceed LIMIT."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while piece := await output.read(PIECE):
        _say({"id": number, "text": decoder.decode(piece)})


def _say(message: JSON) -> None:
    with contextlib.suppress(OSError):
        os.write(1, _line(message))


def _line(message: JSON) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def _reader(pipe: IO[Any]) -> asyncio.StreamReader:
    """A stream that reads a pipe of this process."""
    reader = asyncio.StreamReader(limit=LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader
