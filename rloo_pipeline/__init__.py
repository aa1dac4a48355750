"""RLOO post-training of language models as a DAG of file-to-file stages.

In Python, `open_run("results/demo")` reads a run and `run("my-run.yaml", cores=4)` starts one. Importing this package
imports neither torch nor vllm nor deepspeed, nor what these two need: that comes with their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rloo_pipeline.commands.launch import run
    from rloo_pipeline.report.runs import Run, open_run

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "open_run", "run"]

_PLACES = {"Run": "report.runs", "open_run": "report.runs", "run": "commands.launch"}


def __getattr__(name: str) -> Any:
    """The functions for notebooks, imported when they are first used."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
