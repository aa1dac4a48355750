"""Runs a program as a script. Standard input holds a line with the program's length, then the program, then its
input.
"""

import os
import sys
from types import ModuleType

from rloo_pipeline.user_code.sandbox.inside.limits import READY, apply, begin


def main(bounds: dict[str, int]) -> None:
    """Reads the program from standard input without buffering, so that its input is left for it to read."""
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
        raise EOFError("the parent process died")
    return part
