"""RLOO post-training of language models as a DAG of file-to-file stages.

From Python, `run("my-run.yaml", cores=4)` starts a run and `open_run("results/demo")` reads one. Importing this package
does not import torch, vLLM, DeepSpeed, Snakemake or Arrow.
"""

import sys
from typing import TYPE_CHECKING, Any

from rloo_pipeline.version import __version__

if sys.flags.optimize > 1:  # here, before any module reads the docstrings of the symptoms
    raise SystemExit("rloo: PYTHONOPTIMIZE=2 removes docstrings, which describe tools to the model; unset it")

if TYPE_CHECKING:
    from rloo_pipeline.commands.launch import run
    from rloo_pipeline.report.runs import Run, open_run

__all__ = ["Run", "__version__", "open_run", "run"]

_MODULES = {"Run": "report.runs", "open_run": "report.runs", "run": "commands.launch"}


def __getattr__(name: str) -> Any:
    """Imports the functions for notebooks on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """The public names, for tab completion in notebooks."""
    return sorted(__all__)
