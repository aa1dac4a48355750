"""`rloo worker`: a process that runs stages one at a time and keeps their engines (`engine_cache`).

A stage runs as it would by itself: the same command, its own log, the client's terminal. After an error, or for a stage
that its engine does not fit, the process restarts itself with an empty cache. It ends with the Snakemake that started
it, however that ends, and when a client is killed before its answer.
"""

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
from rloo_pipeline.runtime import controller_watch, cost, devices, environment, gpu_claims, output, scratch
from rloo_pipeline.workers import client, engine_cache, kept_ranks

REQUEST_SECONDS = 10.0
"""Seconds for a request to arrive; a client sends it as soon as it is connected."""


def serve(
    run: Callable[[list[str]], None],
    import_engine: Callable[[str], None],
    path: Path,
    controller: int,
    threads: int | None = None,
    after: str | None = None,
) -> None:
    """Serves requests on `path` until the process `controller` ends.

    Args:
        run: runs `rloo` with these arguments and exits as the command does.
        import_engine: imports, in advance, the libraries that the first stage of a role needs.
        path: socket in a folder that only the user can enter.
        controller: id of the Snakemake process.
        threads: number of CPU threads of an engine whose libraries are imported before the first stage; None imports
            none.
        after: role whose first stage starts before that import, so that it finds its cores free.
    """
    environment_at_start = dict(os.environ)  # without what stages set, such as the GPUs that they take
    os.environ[client.FOLDER] = str(path.parent)  # for stages that another worker scores for
    scratch.use()  # before an import of torch, which would make a removed TMPDIR anew
    _end_with(controller, path.parent)
    engine_cache.enable()
    path.unlink(missing_ok=True)
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        client.with_short_path(listener.bind, str(temporary))
        listener.listen()
        os.replace(temporary, path)  # so that a socket at `path` always has a listener
        if threads:
            while after and not any(path.parent.glob(f"{after}-*.lock")):
                if select.select([listener], [], [], 0.2)[0]:  # a client connects
                    break
            environment.use_threads(threads)
            import_engine(path.name.partition("-")[0])
        while True:
            connection, _ = listener.accept()
            with connection:
                if client.peer(connection)[1] != os.getuid():  # the folder keeps others out, too
                    continue
                if not _answer(connection, listener, run):
                    break
    kept_ranks.close()
    os.execve(sys.executable, [sys.executable, "-m", "rloo_pipeline", *sys.argv[1:]], environment_at_start)


def _answer(connection: socket.socket, listener: socket.socket, run: Callable[[list[str]], None]) -> bool:
    """Runs the requested stage; returns True if the worker can run another one."""
    connection.settimeout(REQUEST_SECONDS)
    try:
        text, descriptors = client.receive(connection)
    except TimeoutError:
        text = b""
    if not text:
        return True
    connection.settimeout(None)
    request = json.loads(text)
    answered = threading.Event()
    threading.Thread(target=_end_with_client, args=(connection, answered), daemon=True).start()
    os.chdir(request["folder"])
    command = "rloo " + " ".join(request["words"])[:500]
    try:
        with output.standard_output_to(descriptors[0]):
            cost.begin(request["started"])
            code = status_of(run, request["words"])
    except IncompatibleEngine as error:
        print(f"{command}: waits until this worker has restarted, since it holds {error}", flush=True)
        answered.set()
        listener.close()  # else the client would connect again to this process, before it has restarted
        _send(connection, None)
        return False
    fit = code == 0 and (not devices.has_gpu() or engine_cache.leave_gpu())
    gpu_claims.release()
    print(f"{command}: {code}", flush=True)
    answered.set()
    _send(connection, code)
    if fit:
        engine_cache.write_pending()
    return fit


def _send(connection: socket.socket, code: int | None) -> None:
    """Answers a client, unless it has gone."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps({"code": code}).encode())
        connection.shutdown(socket.SHUT_RDWR)  # close() would not end it while the thread still polls it


def status_of(run: Callable[[list[str]], None], argv: list[str]) -> int:
    """The exit status of `rloo ARGV`."""
    try:
        run(argv)
    except SystemExit as end:
        if isinstance(end.code, str):  # as Python does at the end of a process
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _end_with_client(connection: socket.socket, answered: threading.Event) -> None:
    """Ends the worker when the client ends before its answer, since nobody would read the result."""
    watch = select.poll()
    watch.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    while not answered.is_set():
        if watch.poll(500) and not answered.is_set():
            os._exit(1)


def _end_with(controller: int, folder: Path) -> None:
    """Removes the sockets and the temporary files and ends this process when `controller` has ended."""

    def end() -> None:
        # the main thread may be importing torch, which makes this folder: one that exists and stays
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch.user_folder())
        try:
            kept_ranks.close()
            engine_cache.abandon()
            shutil.rmtree(folder, ignore_errors=True)
            scratch.leave()
        finally:
            os._exit(0)

    controller_watch.end_with(controller, end)
