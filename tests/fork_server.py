"""The process from which commands of tests are forked, and what becomes of such a fork.

It has imported the libraries, and keeps the modules of this source tree's package aside: a command that would import
them, or those of an unchanged copy, gets them, and one of an edited copy imports that. `serve` runs the commands that
arrive on a socket, each with its own environment, output and exit status. What was forked here has its workers and
ranks forked here too.
"""

import ast
import atexit
import contextlib
import gc
import importlib.util
import json
import logging
import os
import pickle
import pkgutil
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import huge_pages
import shape_checks
from beartype._cache.cacheclear import clear_caches
from fork_client import Fork

ROOT = Path(__file__).parent.parent
PACKAGE = "rloo_pipeline"
LIBRARIES = (
    *("vllm.v1.worker.cpu_worker", "vllm.entrypoints.llm", "vllm.model_executor.layers.quantization.online.base"),
    *("snakemake.cli", "snakemake.report.html_reporter", "snakemake.storage", "smart_open", "yte"),
    *("pyarrow.parquet", "datasets", "peft", "tensorboard.summary.writer.record_writer"),
)
SERVE = "serve"
"""In place of a module: the fork is a server itself, for the process with this id, at this address."""
WORKER = [sys.executable, "-m", PACKAGE, "worker"]
"""The beginning of the command that starts a worker."""
TORCHRUN = [sys.executable, "-m", f"{PACKAGE}.runtime.ranks"]
"""The beginning of the command that starts ranks."""
STUB = """#!{python} -ISu
import sys
sys.path.append({tests!r})
from fork_client import Fork
sys.exit(Fork.of_this_process({address!r}, sys.argv[1:]).wait())
"""
"""The command `rloo` of jobs, and of a worker that restarts."""


def serve(parent: int, listening: int) -> None:
    """Runs the commands that arrive on the socket with this descriptor, until the parent has ended."""
    from rloo_pipeline.user_code.worker import die_with

    die_with(parent)
    listener = socket.socket(fileno=listening)
    select.select([listener], [], [])  # tests that run no command need no imports
    own_modules, own_files = _import(), _files(ROOT / PACKAGE)
    _hide_tests()
    _serve(listener, parent, own_modules, own_files)


def _serve(
    listener: socket.socket,
    client: int,
    own_modules: Mapping[str, ModuleType],
    own_files: Mapping[str, tuple[int, int]],
) -> None:
    """Runs the commands that arrive on a socket, of which one is to be another server, until the client has ended."""
    die_with = own_modules[f"{PACKAGE}.user_code.worker"].die_with
    server, address, client_end = os.getpid(), listener.getsockname().decode(), os.pidfd_open(client)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(client_end, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == client_end:
                os._exit(0)
            if key.fileobj is not listener:
                # else the command has just been answered for, and another one may have the descriptor
                if selector.get_map().get(key.fd) is key:
                    _answer_for(selector, *key.data)
                continue
            connection, _ = listener.accept()
            with connection.makefile() as lines:
                own_session, command = ast.literal_eval(lines.readline())
            if child := os.fork():
                ended = os.pidfd_open(child)
                for place in [ended] if own_session else [ended, connection]:
                    selector.register(place, selectors.EVENT_READ, (child, ended, connection))
                continue
            die_with(server)
            for _, ended, other in {key.data for key in selector.get_map().values() if key.data}:
                os.close(ended)
                other.close()
            selector.close()
            os.close(client_end)
            listener.close()
            if own_session:
                os.setsid()
            if command[0] == SERVE:
                _, client, address = command
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(address)
                listener.listen(100)
                connection.sendall(b"%d\n" % os.getpid())
                connection.close()
                _serve(listener, client, own_modules, own_files)
            connection.close()
            _become(*command, address=address, own_modules=own_modules, own_files=own_files)


def _answer_for(selector: selectors.BaseSelector, child: int, ended: int, connection: socket.socket) -> None:
    """Tells a client how its command ended; if the client has gone, ends the command."""
    pid, status = os.waitpid(child, os.WNOHANG)
    if not pid:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    for place in {ended, connection.fileno()} & selector.get_map().keys():
        selector.unregister(place)
    os.close(ended)
    with connection, contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _fork_workers(address: str) -> None:
    """Makes this process ask the server for the workers and the ranks that it starts."""

    class Popen(subprocess.Popen):
        """A process, or a worker as a fork."""

        def __init__(self, command: Any, *arguments: Any, **options: Any) -> None:
            self.fork = None
            if list(command[: len(TORCHRUN)]) == TORCHRUN and PACKAGE in command:
                program = str(Path(__file__).with_name("fork_client.py"))
                command = [sys.executable, "-ISu", program, address[1:], *command[len(TORCHRUN) :]]
            if list(command[: len(WORKER)]) != WORKER:
                super().__init__(command, *arguments, **options)
                return
            files = [str(Path(options[name].name).absolute()) for name in ("stdout", "stderr")]
            self.fork = Fork(address, [PACKAGE, command[3:], dict(os.environ), os.getcwd(), *files], own_session=True)

        def poll(self) -> int | None:
            return super().poll() if self.fork is None else self.fork.poll()

    subprocess.Popen = Popen  # type: ignore[misc]


def _fork_jobs(address: str) -> None:
    """Makes the jobs of this process, a Snakemake, ask the server for what `rloo` runs."""
    scripts = Path(sys.executable).parent
    if shutil.which("rloo") not in (None, str(scripts / "rloo")):  # the test has one of its own
        return
    folder = Path(tempfile.mkdtemp(prefix="rloo-command-"))
    atexit.register(shutil.rmtree, folder)
    stub = folder / "rloo"
    stub.write_text(STUB.format(python=sys.executable, tests=str(Path(__file__).parent), address=address))
    stub.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(folder), str(scripts), os.environ["PATH"]])


def _fork_restarts(address: str) -> None:
    """Makes this process, a worker, ask the server for the one by which it replaces itself."""
    replace = os.execve
    script = STUB.format(python=sys.executable, tests=str(Path(__file__).parent), address=address)

    def execve(program: str, command: list[str], environment: Mapping[str, str]) -> None:
        replace(program, [program, "-ISuc", script, *command[3:]], environment)

    os.execve = execve


def _import() -> dict[str, ModuleType]:
    """Imports the libraries as this package does; returns the modules of this package, imported anew and set aside."""
    from rloo_pipeline.rollout import vllm_internals
    from rloo_pipeline.runtime.environment import prepare

    prepare(None)
    vllm_internals.import_vllm()
    from rloo_pipeline.training import engine

    engine.import_libraries()
    for name in LIBRARIES:
        importlib.import_module(name)
    _do_once()
    _forget_package()
    shape_checks.install()
    package = importlib.import_module(PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        without_triton = module.name == f"{PACKAGE}.training.one_pass" and not importlib.util.find_spec("triton")
        if not module.name.endswith("__main__") and not without_triton:
            importlib.import_module(module.name)
    own_modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == PACKAGE}
    own_modules[f"{PACKAGE}.report.frame"]._packed_plotly()  # it remembers the result
    _forget_package()
    sys.dont_write_bytecode = True  # a command finds the bytecode of the package, and writes none of what a test edits
    gc.collect()
    gc.freeze()  # else each collection in a fork copies the pages of all that is imported here
    huge_pages.collapse()
    return own_modules


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


def _forget_package() -> None:
    """Removes the modules of this package."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def _files(package: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of a package's files, which a copy keeps and an edit does not."""
    found, folders = {}, [str(package)]
    while folders:
        for entry in os.scandir(folders.pop()):
            if entry.is_dir():
                folders += [entry.path] * (entry.name != "__pycache__")
            else:
                status = entry.stat()
                found[entry.path.removeprefix(str(package))] = (status.st_size, status.st_mtime_ns)
    return found


def _move(modules: Mapping[str, ModuleType], root: Path) -> None:
    """Makes modules those of a copy of this source tree, whose files are the same."""
    for module in modules.values() if root != ROOT else ():
        for name, value in vars(module).items():
            if isinstance(value, Path) and value.is_relative_to(ROOT):
                setattr(module, name, root / value.relative_to(ROOT))
        module.__file__ = module.__spec__.origin = str(root / Path(module.__file__).relative_to(ROOT))
        if module.__spec__.submodule_search_locations is not None:
            module.__path__ = module.__spec__.submodule_search_locations = [str(Path(module.__file__).parent)]


def _hide_tests() -> None:
    """Takes this source tree off the path, since a command has a path of its own."""
    hidden = {str(ROOT), str(Path(__file__).parent)}
    sys.path[:] = [folder for folder in sys.path if folder not in hidden]


def _become(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    *files: str,
    address: str | None = None,
    own_modules: Mapping[str, ModuleType] = MappingProxyType({}),
    own_files: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> None:
    """Runs the command in this process and exits. With the address of a server, what Snakemake starts is forked too."""
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    Path("/proc/self/comm").write_text(" ".join(arguments))  # for `forks.words_of`
    own = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:0] = own
    sys.argv[:] = [module, *arguments]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    package = importlib.util.find_spec(PACKAGE)
    if package and own_modules and _files(Path(package.origin).parent) == own_files:
        sys.modules.update(own_modules)
        _move(own_modules, Path(package.origin).parents[1])
        progress = own_modules[f"{PACKAGE}.runtime.progress"]
        progress.console = type(progress.console)(stderr=True)  # width and colours are those of its environment
    else:  # the modules are imported again, and beartype remembers the classes of the others by name
        clear_caches()
    if address:
        _fork_workers(address)
    if address and module == "snakemake":
        _fork_jobs(address)
    if address and module == PACKAGE and arguments[:1] == ["worker"]:
        _fork_restarts(address)
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
        gc.unfreeze = lambda: None  # vLLM ends with a search for garbage, else in all that was imported before the fork
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
    _forget_package()
    shape_checks.install()
    _hide_tests()
    _become(*command)


if __name__ == "__main__":
    match sys.argv[1:]:
        case "serve", parent, listening:
            serve(int(parent), int(listening))
        case "become", parent, command:
            _run_once(int(parent), json.loads(command))
        case [file]:
            _answer(Path(file))
