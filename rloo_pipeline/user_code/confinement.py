"""Builds the command of the fork server, the process that forks episodes. It can run as an ordinary process, with
another Python, in a sandbox, or in an Apptainer image.

All episodes run in a single sandbox, of the same kind as in `code_reward` (`user_code/sandbox`). They share its /tmp,
its user and its process limit, so one episode can kill another. Code in the sandbox can read Python and its packages,
this package, the code of environments and tools, and the paths in `read_only`. Code in an image sees the image's files,
this package, that code, and `read_only`.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline import frozen_functions, import_string
from rloo_pipeline.config import provenance
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.installation import PACKAGE
from rloo_pipeline.transformers_internals import optional_parts
from rloo_pipeline.user_code import fork_server
from rloo_pipeline.user_code.orphans import MARK
from rloo_pipeline.user_code.process import BOOT, ENVIRONMENT, OF_THIS_PYTHON, THREADS, environment_with, python_command
from rloo_pipeline.user_code.sandbox import command_line, sandbox
from rloo_pipeline.user_code.sandbox.command_line import SandboxLimits

BOOT_IN_IMAGE = BOOT.replace("sys.path[:] =", "sys.path[:] = [path for path in sys.path if path] +")
"""Like BOOT, but the packages of the image's own Python stay on the path, and come first."""
BOOT_BESIDE = (
    "import sys, importlib.util as util; place = sys.argv.pop(1); "
    "spec = util.spec_from_file_location('rloo_pipeline', place + '/__init__.py', submodule_search_locations=[place]); "
    "spec.loader.exec_module(sys.modules.setdefault('rloo_pipeline', util.module_from_spec(spec))); "
    "from {} import main; main(*{})"
)
"""Imports this package from its folder, so that another Python does not see the packages installed beside it."""
CPU_SECONDS = float(1 << 31)
"""Limit on CPU seconds in the sandbox, effectively unlimited: episodes have their own deadlines, and the fork server
must last as long as the stage.
"""
FILE_MB = 512
"""Maximum size of a file, and of the /tmp that the episodes in a sandbox share, in MiB."""
PROCESSES = 16
"""Number of processes and threads per worker in a sandbox; all workers share the total."""


class Confinement(NamedTuple):
    """The sandbox, image or Python in which the processes of tools and environments run."""

    sandbox: bool = False
    memory_mb: int = 2048
    """Memory limit of each process in the sandbox, in MiB."""
    image: str = ""
    read_only: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    """GPUs that these processes see (CUDA_VISIBLE_DEVICES)."""
    python: str = ""
    """Path of another Python to run them with; empty for this one."""

    @property
    def has_own_files(self) -> bool:
        """True if these processes see a different file system than this process."""
        return self.sandbox or bool(self.image)


class ForkServerCommand(NamedTuple):
    """The command that starts the fork server, and its environment."""

    argv: list[str]
    environment: dict[str, str]
    limits: dict[str, int] | None = None
    """Arguments for `sandbox.inside.limits.apply`; None outside a sandbox."""


def reference_inside(confinement: Confinement, reference: str) -> str:
    """Makes an import string valid inside a sandbox or an image, where the working folder differs."""
    module, _, name = reference.rpartition(":")
    of_file = module.endswith(".py") and import_string.of_library(reference)[1] is None
    return f"{Path(module).resolve()}:{name}" if confinement.has_own_files and of_file else reference


def command(confinement: Confinement, references: Sequence[str], file: int, workers: int) -> ForkServerCommand:
    """Returns the command that starts `fork_server.main`.

    Args:
        confinement: sandbox, image or Python to run in.
        references: import strings of the environments and tools.
        file: file descriptor of the socket, passed to `main`.
        workers: maximum number of episodes at a time.

    Raises:
        UserError: no sandbox works here, there is no Apptainer, or a file does not exist.
    """
    variables = ENVIRONMENT | dict.fromkeys(THREADS, "1") | {"CUDA_VISIBLE_DEVICES": ",".join(confinement.gpus)}
    if confinement.python:
        return _with_python(Path(confinement.python).absolute(), file, variables)
    if not confinement.has_own_files:
        return ForkServerCommand(python_command(fork_server.__name__, file), environment_with(1) | variables)
    own = {str(PACKAGE), *read_only_paths(confinement), *_sources(references, with_modules=not confinement.image)}
    if copies := frozen_functions.in_use().folder:
        own.add(copies)
        variables[frozen_functions.VARIABLE] = copies
    folders = [path for path in read_only_paths(confinement) if Path(path).is_dir()]
    if confinement.image:
        arguments = ["-c", BOOT_IN_IMAGE.format(fork_server.__name__, [file]), str(PACKAGE.parent), *folders]
        return _in_image(confinement, own, arguments, variables, workers)
    path = [*(entry for entry in sys.path if Path(entry).is_absolute()), *folders]
    arguments = ["-s", "-S", "-c", BOOT.format(fork_server.__name__, [file]), *path]
    environment = command_line.environment() | variables
    return _in_sandbox(confinement, {*own, *_packages()}, arguments, environment, workers)


def _with_python(python: Path, file: int, variables: dict[str, str]) -> ForkServerCommand:
    if not os.access(python, os.X_OK) or python.is_dir():
        raise UserError(
            f"rollout.environment_python: {python} is not a program; name bin/python of the environment (and where "
            "stages run in an image, what it needs in container.binds)"
        )
    argv = [str(python), "-c", BOOT_BESIDE.format(fork_server.__name__, [file]), str(PACKAGE)]
    inherited = {name: value for name, value in os.environ.items() if name not in OF_THIS_PYTHON}
    return ForkServerCommand(argv, inherited | variables | {MARK: str(os.getpid())})


def _in_image(
    confinement: Confinement, own: set[str], arguments: list[str], variables: dict[str, str], workers: int
) -> ForkServerCommand:
    if not Path(confinement.image).exists():
        raise UserError(f"rollout.environment_image: there is no {confinement.image}; build it, or correct the path")
    passed = {f"APPTAINERENV_{name}": value for name, value in variables.items()}
    files = {*own, optional_parts.schema_file()}
    if confinement.sandbox:
        return _in_sandbox(confinement, files, arguments, command_line.ENVIRONMENT | passed, workers)
    program = command_line.apptainer_program()
    if program is None:
        inside = "APPTAINER_CONTAINER" in os.environ
        where = "in the image of the stages; run without --sdm" if inside else "here; load its module"
        raise UserError(
            f"rollout.environment_image: there is no Apptainer {where}, or install what the environments need beside "
            "the stages and drop the key"
        )
    devices, image = ["--nv"] if confinement.gpus else [], str(Path(confinement.image).resolve())
    argv = command_line.apptainer_argv(program, devices, sorted(files), image) + arguments
    return ForkServerCommand(argv, os.environ | passed)


def _in_sandbox(
    confinement: Confinement, files: set[str], arguments: list[str], environment: dict[str, str], workers: int
) -> ForkServerCommand:
    image = confinement.image and str(Path(confinement.image).resolve())
    box = sandbox.search(tuple(sorted(files)), image, in_image=bool(image))
    if isinstance(box, str):
        where, fix = "here", "install bubblewrap, or set rollout.environment_image for Apptainer"
        if image:
            where = f"in {confinement.image}"
            fix = "leave out rollout.environment_image where bubblewrap is installed, or leave out this key"
        raise UserError(f"rollout.environment_sandbox: no sandbox works {where} ({box}); {fix}")
    processes = PROCESSES * workers + fork_server.RESERVE
    limits = SandboxLimits(CPU_SECONDS, confinement.memory_mb, FILE_MB, processes, open_files=64 + 2 * workers)
    argv = [*command_line.interpreter_argv(box, limits), *arguments]
    return ForkServerCommand(argv, environment, command_line.limits_of_process(box, limits))


def read_only_paths(confinement: Confinement) -> list[str]:
    """Returns `Confinement.read_only` as absolute paths.

    Raises:
        UserError: one does not exist.
    """
    for path in confinement.read_only:
        if not Path(path).exists():
            raise UserError(f"rollout.environment_read_only: there is no {path}; correct the path")
    return [str(Path(path).absolute()) for path in confinement.read_only]


def _packages() -> Iterator[str]:
    """Yields the folders of installed packages."""
    for path in sys.path:
        if {"site-packages", "dist-packages"} & set(Path(path).parts) and Path(path).is_dir():
            yield path


def _sources(references: Iterable[str], with_modules: bool) -> Iterator[str]:
    """Yields the files with the code of environments and tools. A reference to a file also yields the local files that
    it imports; a reference to a module of a package that is not installed yields the whole package.
    """
    installed = [PACKAGE, *map(Path, _packages())]
    for reference in references:
        module, source = reference.rpartition(":")[0], import_string.source_of(reference)
        if source is not None and module.endswith(".py"):
            yield from map(str, filter(Path.exists, provenance.source_files(reference, source)))
        elif source is not None and with_modules and not any(source.is_relative_to(folder) for folder in installed):
            package = importlib.util.find_spec(module.partition(".")[0])
            yield from (package.submodule_search_locations or [str(source)]) if package else ()
