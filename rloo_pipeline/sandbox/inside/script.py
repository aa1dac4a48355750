"""Runs a program as a script: standard input holds the program's length in a line, the program, and then its input."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from rloo_pipeline.sandbox.inside.limits import READY, apply, begin


def main(bounds: dict[str, int]) -> None:
    """Reads the program byte by byte off the descriptor, so that its input is left for itself."""
    apply(bounds)
    os.write(1, READY)
    length = b""
    while not length.endswith(b"\n"):
        length += _read(1)
    text = b""
    while len(text) < int(length):
        text += _read(int(length) - len(text))
    begin()
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(text, "program.py", "exec"), module.__dict__)


def _read(most: int) -> bytes:
    part = os.read(0, most)
    if not part:
        raise EOFError("whoever started this is gone")
    return part
