"""`rloo worker`: a process that runs stages one after the other and keeps their engines (`kept`).

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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rloo_pipeline import kept, runtime
from rloo_pipeline.workers import client

CALM = 0.3
"""Seconds without a request after which a worker does what has time: at once it would be in the way of the next stage's
start.
"""


def serve(run: Callable[[list[str]], None], path: Path, controller: int, ahead: int | None = None) -> None:
    """Listens on `path` until the process `controller` is gone.

    Args:
        run: does what the words after `rloo` say, and exits as the command does.
        path: socket in a folder that nobody else can enter.
        controller: number of the process that the worker works for.
        ahead: CPU threads of the engine whose libraries are imported before a stage asks, None for none.
    """
    _end_with(controller, path.parent)
    # engines that share a GPU have it for their own stages: nothing is begun ahead
    tell = None if runtime.has_gpu() else partial(client.announce, str(path.parent))
    kept.start(tell, partial(client.own_shards, path))
    if ahead:
        runtime.use_threads(ahead)
        kept.afterwards(_import_ahead)
    path.unlink(missing_ok=True)
    beside = path.with_suffix(".new")
    beside.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        client.reach(listener.bind, str(beside))
        listener.listen()
        os.replace(beside, path)  # where there is a socket, somebody listens
        while _wait(listener):
            line, _ = listener.accept()
            with line:
                if not _answer(line, run):
                    break
    os.execv(sys.executable, [sys.executable, "-m", "rloo_pipeline", *sys.argv[1:]])


def _import_ahead() -> None:
    """The libraries of trainers and readers, while the first sampler starts."""
    from rloo_pipeline.training import engine

    engine.libraries()


def _wait(listener: socket.socket) -> bool:
    """Until somebody asks, and does meanwhile what there is to do; whether that went well."""
    try:
        while not select.select([listener], [], [], 0)[0]:
            if not kept.go_on():
                if not select.select([listener], [], [], CALM)[0]:
                    kept.catch_up()
                return True
    except (kept.Unfit, Exception) as why:
        print(f"ahead of its stage: {why}; this worker starts anew", flush=True)
        return False
    return True


def _answer(line: socket.socket, run: Callable[[list[str]], None]) -> bool:
    """Runs what is asked for; whether it went well."""
    text, descriptors, *_ = socket.recv_fds(line, 1 << 20, 2)
    while text and not text.endswith(b"\n"):  # the words of many shards come in several pieces
        piece = line.recv(1 << 20)
        text = text + piece if piece else b""
    if not text:
        return True
    request = json.loads(text)
    if "ahead" in request:
        return _do_ahead(request["ahead"], descriptors)
    over = threading.Event()
    threading.Thread(target=_end_with_asker, args=(line, over), daemon=True).start()
    os.chdir(request["folder"])
    called = "rloo " + " ".join(request["words"])[:500]
    try:
        with runtime.outputs_to(descriptors[0]):
            runtime.begin(request["started"])
            code = _status(run, request["words"])
    except kept.Unfit as why:
        print(f"{called}: left to itself, since this worker holds {why}", flush=True)
        over.set()
        return False
    fit = code == 0 and (not runtime.has_gpu() or kept.leave_gpu())
    print(f"{called}: {code}", flush=True)
    over.set()
    with contextlib.suppress(OSError):
        line.sendall(json.dumps({"code": code}).encode())
        line.shutdown(socket.SHUT_RDWR)  # the thread still polls it, so closing it would not end it yet
    return fit


def _do_ahead(what: Mapping[str, str], files: Sequence[int]) -> bool:
    """Does what can be done of a stage to come; whether what this worker keeps is still fit for use."""
    called = f"ahead of its stage, {' '.join(what.values())}"
    try:
        if "policy" in what:
            from rloo_pipeline.generation import groups

            done = groups.take_ahead(Path(what["policy"]))
        elif "rollouts" in what:
            from rloo_pipeline.stages import score

            first, *_, count = what["rows"].split()
            done = score.score_ahead(files[0], int(first), int(count))
        else:
            from rloo_pipeline.stages import update

            done = update.train_ahead(*files)
    except (kept.Unfit, Exception) as why:
        print(f"{called}: {why}; this worker starts anew", flush=True)
        return False
    print(f"{called}: {'taken' if done else 'left'}", flush=True)
    return True


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
