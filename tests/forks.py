"""Commands without their imports: forks of one process that has the libraries, each as new as a process of its own.

A stage imports its libraries for 5 to 10 s of CPU and does in a test what takes a tenth of that. `run` stands for
`subprocess.run([sys.executable, "-m", MODULE, *words])`: the same code from the same folder and PYTHONPATH, with its
own environment, outputs and exit status. The libraries are there already, and none of this package is.
"""

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARIES = ("vllm.v1.worker.cpu_worker", "snakemake.cli", "pyarrow.parquet", "datasets", "peft")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
"""A fork can start no pool of threads that its parent had; a stage with more than one is a process of its own."""

_server: subprocess.Popen[str] | None = None


def run(
    module: str, words: Sequence[str], environment: Mapping[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m MODULE WORDS` in a folder, the current one by default."""
    server = _started()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
        request = [module, words, dict(environment), str(folder or Path.cwd()), *files]
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
        except BaseException:  # a test that took too long: what it began must not answer the next one
            os.killpg(server.pid, signal.SIGKILL)
            close()
            raise
        said = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (out, err)]
    return subprocess.CompletedProcess([module, *words], code, *said)


def close() -> None:
    """Ends the process that is forked, if there is one."""
    global _server
    if _server is not None:
        _server.stdin.close()
        _server.wait()
        _server = None


def _started() -> subprocess.Popen[str]:
    global _server
    if _server is None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        environment = os.environ | ENVIRONMENT
        command = [sys.executable, __file__]
        _server = subprocess.Popen(command, **pipes, text=True, env=environment, start_new_session=True)
    return _server


def _serve() -> None:
    """Does what is asked for, line by line, until nobody can ask any more."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "r+") as nowhere:
        for number in (0, 1):
            os.dup2(nowhere.fileno(), number)
    _import()
    for line in requests:
        child = os.fork()
        if not child:
            requests.close()
            answers.close()
            _become(*json.loads(line))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")


def _import() -> None:
    """The libraries, the way in which this package imports them, and then nothing of this package."""
    from rloo_pipeline import lean, runtime

    runtime.prepare(None)
    lean.vllm()
    from rloo_pipeline.training import engine

    engine.libraries()
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rloo_pipeline"]:
        del sys.modules[name]
    taken = {str(ROOT), str(Path(__file__).parent)}
    sys.path[:] = [folder for folder in sys.path if folder not in taken]


def _become(module: str, words: list[str], environment: dict[str, str], folder: str, *files: str) -> None:
    """Is the command to its end, in a process that was forked for it."""
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    own = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:0] = own
    sys.argv[:] = [module, *words]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
