"""Runs commands without the cost of their imports, as forks of one process that has imported the libraries.

A stage spends 5 to 10 s of CPU on imports, and in a test a tenth of that on its work. `run` replaces
`subprocess.run([sys.executable, "-m", MODULE, *arguments])`: the same code from the same folder and PYTHONPATH, with
its own environment, output and exit status. The libraries are imported already, the modules of this package are not.

A process that has CUDA, or might get it, must not be forked. So on a machine with a GPU, and with pytest's
`--no-forks`, each command is a new process (`use_forks`), and tests with an engine have the GPU in turns (`turn`). The
process of the tests itself does not use the GPU (`hide_gpu`), since tests compare with tensors on the CPU; a test that
holds a vLLM engine in it has the marker `holds_vllm` and is then a pytest of its own.
"""

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import own_pytest
import shape_checks
from filelock import FileLock

ROOT = Path(__file__).parent.parent
LIBRARIES = (
    *("vllm.v1.worker.cpu_worker", "vllm.entrypoints.llm", "vllm.model_executor.layers.quantization.online.base"),
    *("snakemake.cli", "pyarrow.parquet", "datasets", "peft"),
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
"""One thread, since a fork does not inherit the threads of a pool."""

GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
"""What the tests were started with."""
HAS_GPU = Path("/dev/nvidiactl").exists()
use_forks = not HAS_GPU
"""Whether commands are forks; `--no-forks` makes it false."""
_in_turns = FileLock(Path(tempfile.gettempdir()) / f"rloo-tests-{os.getuid()}.gpu")
_server: subprocess.Popen[str] | None = None


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
        request = [
            [str(module), list(arguments), dict(environment), str(folder or Path.cwd())]
            + [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in texts]
            for (module, arguments, environment, folder), texts in zip(commands, outputs, strict=True)
        ]
        codes = _forked(request) if use_forks else _started_anew(request)
        texts = [
            [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in files_of_command]
            for files_of_command in outputs
        ]
    return [
        subprocess.CompletedProcess(*result) for result in zip(commands, codes, *zip(*texts, strict=True), strict=True)
    ]


def _forked(request: list[list[Any]]) -> list[int]:
    """Exit statuses of commands, as forks."""
    server = _started()
    try:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())
    except BaseException:  # such as a test's timeout: the next test must not read the answers to these commands
        os.killpg(server.pid, signal.SIGKILL)
        close()
        raise


def _started_anew(request: list[list[Any]]) -> list[int]:
    """Exit statuses of commands, each in a new process of the same interpreter."""
    processes = []
    try:
        for command in request:
            start = [sys.executable, __file__, "become", str(os.getpid()), json.dumps(command)]
            environment = {**command[2], "PYTHONPATH": str(ROOT)}
            processes.append(subprocess.Popen(start, env=environment, stdin=subprocess.DEVNULL, start_new_session=True))
        return [process.wait() for process in processes]
    except BaseException:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def run_ranks(
    module: str, arguments: Sequence[str], count: int, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """Runs a command as the ranks of one job, each with the environment that torchrun would set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    job |= {"LOCAL_WORLD_SIZE": str(count)}
    ranks = [
        os.environ | environment | job | {"RANK": str(n), "LOCAL_RANK": str(n), "GROUP_RANK": "0"} for n in range(count)
    ]
    return run_together([Command(module, arguments, environment) for environment in ranks])


def call(function: Callable[..., Any], *values: Any) -> Any:
    """Calls a module's function in a process of its own and returns its result."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "call"
        file.write_bytes(pickle.dumps((function, values)))
        outcome = run(__file__, [str(file)], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        assert outcome.returncode == 0, outcome.stderr
        return pickle.loads(file.read_bytes())


def close() -> None:
    """Ends the process from which commands are forked, if it runs."""
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
        command = [sys.executable, __file__, "serve", str(os.getpid())]
        _server = subprocess.Popen(command, **pipes, text=True, env=environment, start_new_session=True)
    return _server


def _serve(parent: int) -> None:
    """Runs the commands of each request, a line of JSON, until standard input is closed or the parent has ended, also
    where a process that was forked by a test keeps that input open.
    """
    from rloo_pipeline.user_code.worker import die_with

    die_with(parent)
    server = os.getpid()
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "r+") as null:
        for number in (0, 1):
            os.dup2(null.fileno(), number)
    _import()
    _hide_tests()
    for line in requests:
        children = []
        for command in json.loads(line):
            children.append(os.fork())
            if not children[-1]:
                die_with(server)
                requests.close()
                answers.close()
                _become(*command)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        answers.write(json.dumps(codes) + "\n")


def _import() -> None:
    """Imports the libraries as this package does, then removes the modules of this package."""
    from rloo_pipeline.runtime import import_shims
    from rloo_pipeline.runtime.environment import prepare

    prepare(None)
    import_shims.import_vllm()
    from rloo_pipeline.training import engine

    engine.import_libraries()
    for name in LIBRARIES:
        importlib.import_module(name)
    _do_once()
    for name in [name for name in sys.modules if name.partition(".")[0] == "rloo_pipeline"]:
        del sys.modules[name]
    shape_checks.install()
    gc.collect()
    gc.freeze()  # else each collection in a fork copies the pages of all that is imported here


def _do_once() -> None:
    """Does here what each fork would do for itself: seconds of CPU at every start of vLLM."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from vllm.platforms import current_platform

    get_checkpoint_conversion_mapping("qwen3")  # makes that of all models
    current_platform.register_triton_kernel_overrides()  # looks for kernels in all modules
    type(current_platform).register_triton_kernel_overrides = lambda *_: None
    set_level = logging.Logger.setLevel

    def set_other_level(self: logging.Logger, level: int | str) -> None:
        if self.level != logging._checkLevel(level):  # else clears the cache of a thousand loggers, for nothing
            set_level(self, level)

    logging.Logger.setLevel = set_other_level


def _hide_tests() -> None:
    """Takes this source tree off the path, since a command has a path of its own."""
    hidden = {str(ROOT), str(Path(__file__).parent)}
    sys.path[:] = [folder for folder in sys.path if folder not in hidden]


def _become(module: str, arguments: list[str], environment: dict[str, str], folder: str, *files: str) -> None:
    """Runs the command in this process and exits."""
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    own = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:0] = own
    sys.argv[:] = [module, *arguments]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    code = 0
    try:
        if module.endswith(".py"):
            sys.path.insert(0, str(Path(module).parent))
            runpy.run_path(module, run_name="__main__")
        else:
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


def _answer(file: Path) -> None:
    """Calls the pickled function in `file` and writes its result there."""
    function, values = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(function(*values)))


def _run_once(parent: int, command: list[Any]) -> None:
    """Runs a command in this new process, which ends with its parent."""
    from rloo_pipeline.user_code.worker import die_with

    die_with(parent)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rloo_pipeline"]:
        del sys.modules[name]
    shape_checks.install()
    _hide_tests()
    _become(*command)


if __name__ == "__main__":
    match sys.argv[1:]:
        case "serve", parent:
            _serve(int(parent))
        case "become", parent, command:
            _run_once(int(parent), json.loads(command))
        case [file]:
            _answer(Path(file))
