"""Runs a program as a script: standard input holds the program's length in a line, the program, and then its input."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from rloo_pipeline.rewards.sandboxed.limits import apply


def main(bounds: dict[str, int]) -> None:
    """Reads the program byte by byte off the descriptor, so that its input is left for itself."""
    apply(bounds)
    length = b""
    while not length.endswith(b"\n"):
        length += os.read(0, 1)
    text, left = b"", int(length)
    while left:
        part = os.read(0, left)
        text, left = text + part, left - len(part)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(text, "program.py", "exec"), module.__dict__)
