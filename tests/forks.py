"""Runs commands without the cost of their imports, as forks of one process that has imported them (`fork_server`).

A stage spends 5 to 10 s of CPU on imports, and in a test a tenth of that on its work. `run` replaces
`subprocess.run([sys.executable, "-m", MODULE, *arguments])`: the same code from the same folder and PYTHONPATH, with
its own environment, output and exit status.

A process that has CUDA, or might get it, must not be forked. So on a machine with a GPU, and with pytest's
`--no-forks`, each command is a new process (`use_forks`), and tests with an engine have the GPU in turns (`turn`). The
process of the tests itself does not use the GPU (`hide_gpu`), since tests compare with tensors on the CPU; a test that
holds a vLLM engine in it has the marker `holds_vllm` and is then a pytest of its own.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fork_server
import own_pytest
import psutil
from filelock import FileLock
from fork_client import Fork, rank_variables

from rloo_pipeline.runtime import devices

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
"""One thread, since a fork does not inherit the threads of a pool."""

GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
"""What the tests were started with."""
HAS_GPU = Path("/dev/nvidiactl").exists()
use_forks = not HAS_GPU
"""Whether commands are forks; `--no-forks` makes it false."""
_in_turns = FileLock(Path(tempfile.gettempdir()) / f"rloo-tests-{os.getuid()}.gpu")
_address = f"\0rloo-tests-{os.getpid()}"
"""Socket of the process from which commands are forked: a name that no file has."""
SHARED = "RLOO_TESTS_SERVER"
"""Variable with the address of the server of which the servers of pytest's workers are forks, without its null byte."""
_server: subprocess.Popen[bytes] | psutil.Process | None = None


class Command(NamedTuple):
    """`python -m MODULE ARGUMENTS`, or `python MODULE ARGUMENTS` if MODULE is a file."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path | None = None
    """Working folder, by default that of this process."""


def run(*command: Any) -> subprocess.CompletedProcess[str]:
    """Runs one command; the arguments are the fields of `Command`."""
    return run_together([Command(*command)])[0]


def hide_gpu() -> None:
    """Makes torch see no GPU in this process; commands that it starts still do."""
    import torch

    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0


@contextlib.contextmanager
def turn(engine: bool) -> Iterator[None]:
    """A test's turn: with an engine it has the GPU to itself, else it sees none. Without a GPU, nothing changes."""
    if not HAS_GPU or own_pytest.VARIABLE in os.environ:
        yield
        return
    if engine:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ.update({} if GPUS is None else {"CUDA_VISIBLE_DEVICES": GPUS})
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with _in_turns if engine else contextlib.nullcontext():
        yield


def run_together(commands: Sequence[Command]) -> list[subprocess.CompletedProcess[str]]:
    """Runs commands at the same time."""
    with contextlib.ExitStack() as files:
        outputs = [[files.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in commands]
        files_of = [[f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in texts] for texts in outputs]
        request = _requests(commands, files_of)
        codes = _forked(request) if use_forks else _started_anew(request)
        texts = [
            [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in files_of_command]
            for files_of_command in outputs
        ]
    return [
        subprocess.CompletedProcess(*result) for result in zip(commands, codes, *zip(*texts, strict=True), strict=True)
    ]


def _requests(commands: Sequence[Command], files: Sequence[Sequence[str]]) -> list[list[Any]]:
    """Commands with the files of their output, as `fork_server` takes them."""
    return [
        [str(module), list(arguments), dict(environment), str(folder or Path.cwd()), *texts]
        for (module, arguments, environment, folder), texts in zip(commands, files, strict=True)
    ]


def start(command: Command, output: Path) -> "Fork | subprocess.Popen[bytes]":
    """Starts a command that writes to a file. It can be polled, waited for and killed."""
    output.touch()
    [request] = _requests([command], [[str(output)] * 2])
    if not use_forks:
        return _new_process(request)
    _started()
    return Fork(_address, request)


def address() -> str:
    """Socket of the process from which commands are forked, for a program of a test; empty without forks."""
    if use_forks:
        _started()
    return _address if use_forks else ""


def share() -> None:
    """Has the libraries imported once for all pytest workers that this process starts."""
    os.environ[SHARED] = address()[1:]


def words_of(process: psutil.Process) -> list[str]:
    """The command line of a process that may have ended; of a fork, the beginning of its arguments."""
    try:
        words = process.cmdline()
        return process.name().split() if fork_server.__file__ in words else words
    except psutil.NoSuchProcess:
        return []


def _forked(request: list[list[Any]]) -> list[int]:
    """Exit statuses of commands, as forks."""
    server = _started()
    try:
        return [fork.wait() for fork in [Fork(_address, command) for command in request]]
    except BaseException:  # such as a test's timeout: these commands must not run beside the next test
        os.killpg(server.pid, signal.SIGKILL)
        close()
        raise


def _started_anew(request: list[list[Any]]) -> list[int]:
    """Exit statuses of commands, each in a new process of the same interpreter."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += map(_new_process, request)
        return [process.wait() for process in processes]
    except BaseException:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def _new_process(command: list[Any]) -> subprocess.Popen[bytes]:
    start = [sys.executable, fork_server.__file__, "become", str(os.getpid()), json.dumps(command)]
    environment = {**command[2], "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(start, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def run_ranks(
    module: str, arguments: Sequence[str], count: int, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """Runs a command as the ranks of one job, each with the environment that torchrun would set; on CPUs where there
    are GPUs, but not one for each rank.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if HAS_GPU and len(devices.visible_gpus()) < count else {}
    ranks = [os.environ | hidden | environment | of_rank for of_rank in rank_variables(count)]
    return run_together([Command(module, arguments, environment) for environment in ranks])


def call(function: Callable[..., Any], *values: Any) -> Any:
    """Calls a module's function in a process of its own and returns its result."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "call"
        file.write_bytes(pickle.dumps((function, values)))
        outcome = run(fork_server.__file__, [str(file)], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        assert outcome.returncode == 0, outcome.stderr
        return pickle.loads(file.read_bytes())


def close() -> None:
    """Ends the process from which commands are forked, if it runs, and with it these commands."""
    global _server
    if _server is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            _server.kill()
            _server.wait()
        _server = None


def _started() -> subprocess.Popen[bytes] | psutil.Process:
    global _server
    if _server is None and SHARED in os.environ:
        asked = Fork(f"\0{os.environ[SHARED]}", [fork_server.SERVE, os.getpid(), _address], own_session=True)
        _server = psutil.Process(asked.wait())
    if _server is None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(_address)
            listener.listen(100)
            command = [sys.executable, fork_server.__file__, "serve", str(os.getpid()), str(listener.fileno())]
            _server = subprocess.Popen(
                command,
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[listener.fileno()],
            )
    return _server
