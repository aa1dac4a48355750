"""The examiner: a process that runs the tests in its own sandbox and reports results on standard error.

Names that are neither defined by the tests nor Python builtins are looked up in the program, and so is a builtin that
the program has to define. The program runs in another sandbox and is reached over the wire (`remote_program.py`).
"""

import ast
import builtins
import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from rloo_pipeline.user_code.sandbox.inside.limits import READY, apply, begin
from rloo_pipeline.user_code.sandbox.inside.remote_program import ProgramProxy
from rloo_pipeline.user_code.sandbox.inside.wire import Wire


def main(bounds: dict[str, int]) -> None:
    """Reads the program and the tests, runs the tests in turn, and writes a line of JSON for each."""
    apply(bounds)
    wire, report = Wire(), os.fdopen(os.dup(2), "w")
    os.dup2(1, 2)  # the null device
    os.write(report.fileno(), READY)
    job = wire.receive()
    begin()
    for result in examine(ProgramProxy(wire, job["program"]), job["units"], job["builtin"], job["all"]):
        report.write(json.dumps(result) + "\n")
        report.flush()


def examine(
    program: ProgramProxy, units: list[tuple[str, bool]], builtin: str, every: bool
) -> Iterator[dict[str, Any]]:
    """Runs the tests. Stops if preparation fails, and at the first failed test unless `every` is true.

    Args:
        program: the program under test.
        units: pieces of code, each with True if it is a test and False if it is preparation.
        builtin: name of the builtin that the program defines itself; empty if there is none.
        every: run all tests.

    Yields:
        {"passed": …} for each test; {"unsupported": reason} if the tests cannot be run here.
    """
    texts = [text for text, _ in units]
    try:
        names = TestNamespace(program, texts, builtin)
        codes = [compile(text, "tests.py", "exec") for text in texts]
    except (MemoryError, RecursionError) as error:
        yield {"unsupported": f"Python cannot compile them within the limits ({type(error).__name__})"}
        return
    for code, (_, is_test) in zip(codes, units, strict=True):
        try:
            exec(code, names)
            passed = not program.ended
        except BaseException as error:
            passed = False
            if isinstance(error, ImportError) and not program.caused(error):
                program.unsupported = program.unsupported or str(error)
        if program.unsupported:
            yield {"unsupported": program.unsupported}
            return
        if is_test:
            yield {"passed": passed}
        if not passed and (program.ended or not is_test or not every):
            return


class TestNamespace(dict[str, Any]):
    """The tests' namespace. A name that the tests do not define is looked up in the program each time it is used."""

    def __init__(self, program: ProgramProxy, texts: list[str], builtin: str) -> None:
        super().__init__(__name__="__main__")  # as where a file of tests is run
        self._program, self._builtin = program, builtin
        self._modules = standard_modules(texts)

    def __missing__(self, name: str) -> Any:
        if name == self._builtin:
            try:
                return self._program.name(name)
            except KeyError:  # Python would fall back to the builtin
                raise NameError(f"the program does not define {name}") from None
        if hasattr(builtins, name):  # never use the program's: its `abs` could always return 0
            raise KeyError(name)
        if name in self._modules:
            return importlib.import_module(name)
        return self._program.name(name)


def standard_modules(texts: list[str]) -> set[str]:
    """Standard modules that tests use by name. `math.isclose`, for example, must not come from the program either."""
    nodes = list(ast.walk(ast.parse("\n".join(texts))))
    owners = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return (owners - called) & set(getattr(sys, "stdlib_module_names", ("math", "itertools", "collections")))
