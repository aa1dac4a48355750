"""`rloo worker`: a process that runs stages one after the other and keeps their engines (`engine_cache`).

A stage runs here as it would by itself: the same command, its own log, the terminal of the one that asked. After an
error, or a request for what its engine cannot become, the process starts itself anew, with nothing kept. It ends with
the Snakemake that started it, whatever way that ends, and with a request whose stage was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.runtime import cost, devices, environment, output
from rloo_pipeline.workers import client, engine_cache


def serve(run: Callable[[list[str]], None], path: Path, controller: int, preload: int | None = None) -> None:
    """Listens on `path` until the process `controller` is gone.

    Args:
        run: does what the words after `rloo` say, and exits as the command does.
        path: socket in a folder that nobody else can enter.
        controller: number of the process that the worker works for.
        preload: CPU threads of a trainer, whose libraries are imported while the first sampler starts; None for no
            trainer.
    """
    _end_with(controller, path.parent)
    engine_cache.start()
    path.unlink(missing_ok=True)
    beside = path.with_suffix(".new")
    beside.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        client.with_short_path(listener.bind, str(beside))
        listener.listen()
        os.replace(beside, path)  # where there is a socket, somebody listens
        if preload:
            from rloo_pipeline.training import engine

            environment.use_threads(preload)
            engine.libraries()
        while True:
            line, _ = listener.accept()
            with line:
                if not _answer(line, run):
                    break
    os.execv(sys.executable, [sys.executable, "-m", "rloo_pipeline", *sys.argv[1:]])


def _answer(line: socket.socket, run: Callable[[list[str]], None]) -> bool:
    """Runs what is asked for; whether it went well."""
    text, descriptors, *_ = socket.recv_fds(line, 1 << 20, 2)
    while text and not text.endswith(b"\n"):  # the words of many shards come in several pieces
        piece = line.recv(1 << 20)
        text = text + piece if piece else b""
    if not text:
        return True
    request = json.loads(text)
    over = threading.Event()
    threading.Thread(target=_end_with_asker, args=(line, over), daemon=True).start()
    os.chdir(request["folder"])
    called = "rloo " + " ".join(request["words"])[:500]
    try:
        with output.outputs_to(descriptors[0]):
            cost.begin(request["started"])
            code = _status(run, request["words"])
    except IncompatibleEngine as why:
        print(f"{called}: left to itself, since this worker holds {why}", flush=True)
        over.set()
        return False
    fit = code == 0 and (not devices.has_gpu() or engine_cache.leave_gpu())
    print(f"{called}: {code}", flush=True)
    over.set()
    with contextlib.suppress(OSError):
        line.sendall(json.dumps({"code": code}).encode())
        line.shutdown(socket.SHUT_RDWR)  # the thread still polls it, so closing it would not end it yet
    return fit


def _status(run: Callable[[list[str]], None], words: list[str]) -> int:
    """The exit status of `rloo WORDS`."""
    try:
        run(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _end_with_asker(line: socket.socket, over: threading.Event) -> None:
    """Ends the worker when the stage that asked is gone before its answer: nobody waits for what would be written."""
    watch = select.poll()
    watch.register(line, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    while not over.is_set():
        if watch.poll(500) and not over.is_set():
            os._exit(1)


def _end_with(controller: int, folder: Path) -> None:
    """Ends this process, and removes the sockets, when `controller` has ended."""
    handle = os.pidfd_open(controller)

    def wait() -> None:
        select.select([handle], [], [])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
