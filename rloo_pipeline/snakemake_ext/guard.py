"""Whether the libraries whose insides this room changes are the versions that the changes were made for.

A change of a library's insides can stop working without an error when the library changes: assigning to a method that
was renamed succeeds and does nothing. So each change names its version and the signature of what it replaces, and
another version or signature ends the call with a sentence.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version

from rloo_pipeline.errors import UserError

MADE_FOR = {"snakemake": "9.27.1", "snakemake-executor-plugin-slurm": "2.8.0"}
"""Distributions and the versions that this room was made for and is tested with (requirements/controller.txt)."""


def require(distribution: str) -> None:
    """Checks a library's version.

    Raises:
        UserError: another version is installed.
    """
    installed = version(distribution)
    if installed != MADE_FOR[distribution]:
        raise UserError(
            f"{distribution} {installed} is installed, and rloo_pipeline/snakemake_ext changes how "
            f"{MADE_FOR[distribution]} works: install {distribution}=={MADE_FOR[distribution]}, as in "
            "requirements/controller.txt"
        )


def require_method(owner: type, name: str, expected: str) -> None:
    """Checks a method that is replaced, overridden or called.

    Args:
        expected: its signature without annotations and defaults, such as `(self, job)`.

    Raises:
        UserError: it is gone, or takes other parameters.
    """
    place = f"{owner.__module__}.{owner.__qualname__}.{name}"
    if not hasattr(owner, name):
        raise UserError(f"{place} is gone: rloo_pipeline/snakemake_ext needs it; install requirements/controller.txt")
    empty = inspect.Parameter.empty
    parameters = inspect.signature(getattr(owner, name)).parameters.values()
    signature = str(inspect.Signature([parameter.replace(annotation=empty, default=empty) for parameter in parameters]))
    if signature != expected:
        raise UserError(
            f"{place} takes {signature} here and {expected} in the version that rloo_pipeline/snakemake_ext was made "
            "for: install requirements/controller.txt"
        )
