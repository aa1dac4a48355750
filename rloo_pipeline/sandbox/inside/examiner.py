"""The examiner's side: runs the tests, in a sandbox of its own, and reports what passed on its standard error.

Names that the tests neither define nor find among Python's builtins are the program's. The program lives in another
sandbox and is asked through the wire: its functions give back plain data, which are compared here, by this Python's own
`==`. An object of the program's own classes stays with the program and is stood for by `Remote`, which is equal to no
plain data.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from rloo_pipeline.sandbox.inside.limits import READY, apply, begin
from rloo_pipeline.sandbox.inside.wire import Wire, decode, encode


class Gone(BaseException):
    """The program's process is no more, or talks nonsense; no `except Exception` of a test shall catch it."""


class Unsupported(BaseException):
    """The tests need something that the wire does not carry."""


def main(bounds: dict[str, int]) -> None:
    """Reads program and tests, runs test after test, and writes a line of JSON for each."""
    apply(bounds)
    wire = Wire(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    report = os.fdopen(os.dup(2), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.write(report.fileno(), READY)
    given = wire.receive()
    begin()
    for line in examine(Program(wire, given["program"]), given["units"], given["all"]):
        report.write(json.dumps(line) + "\n")
        report.flush()


def examine(program: Program, units: list[tuple[str, bool]], every: bool) -> Iterator[dict[str, Any]]:
    """{"passed": …} for each unit that is a test; {"unsupported": why} where the tests cannot be run here.

    A unit that only prepares and fails ends it; so does the first failed test, unless `every` is true.
    """
    names = Names(program, [text for text, _ in units])
    for text, counts in units:
        try:
            exec(compile(text, "tests.py", "exec"), names)
            passed = not program.gone
        except BaseException as error:
            passed = False
            if isinstance(error, ImportError) and error is not program.raised:
                program.unsupported = program.unsupported or str(error)
        if program.unsupported:
            yield {"unsupported": program.unsupported}
            return
        if counts:
            yield {"passed": passed}
        if not passed and (program.gone or not counts or not every):
            return


class Names(dict[str, Any]):
    """The tests' namespace: a name that they do not define is asked of the program at each use."""

    def __init__(self, program: Program, texts: list[str]) -> None:
        super().__init__(__name__="tests")
        self._program = program
        self._modules = _modules("\n".join(texts))

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):  # never the program's: it could make `abs` say 0
            raise KeyError(name)
        if name in self._modules:
            return importlib.import_module(name)
        return self._program.name(name)


def _modules(text: str) -> set[str]:
    """Names that the tests use as modules of the standard library: `math.isclose` must not be the program's either."""
    nodes = list(ast.walk(ast.parse(text)))
    owners = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return (owners - called) & set(getattr(sys, "stdlib_module_names", ("math", "itertools", "collections")))


class Program:
    """The program, asked over the wire."""

    def __init__(self, wire: Wire, text: str) -> None:
        self.gone = False
        self.unsupported: str | None = None
        self.raised: BaseException | None = None
        self._wire = wire
        self._lent: list[Any] = []
        self._classes: dict[tuple[str, str], type[Exception]] = {}
        try:
            wire.send({"ready": None})
            wire.receive()
            wire.send({"program": text})
            self.gone = "value" not in wire.receive()
        except (OSError, EOFError, ValueError, TypeError):
            self.gone = True

    def name(self, name: str) -> Any:
        """What the program calls by this name; KeyError where it has none."""
        return self._exchange({"do": "name", "name": name}, [])

    def ask(self, do: str, on: int, *args: Any, **named: Any) -> Any:
        """Does something with an object of the program; its exceptions are raised here."""
        request = {
            "do": do,
            "on": on,
            "args": [encode(arg, self._refer) for arg in args],
            "named": {name: encode(arg, self._refer) for name, arg in named.items()},
        }
        return self._exchange(request, list(args))

    def _exchange(self, request: dict[str, Any], args: list[Any]) -> Any:
        if self.gone:
            raise Gone
        try:
            self._wire.send(request)
            while "call" in (reply := self._wire.receive()):
                self._wire.send(self._called(reply))
            if "raise" not in reply:
                for row, after in reply.get("changed", {}).items():
                    _become(args[int(row)], decode(after, self._resolve))
                return decode(reply["value"], self._resolve)
            name, known, words = reply["raise"]
            self.raised = self._class(str(name), str(known))(str(words))
        except Unsupported:
            raise
        except Exception as error:  # whatever can be wrong with a message
            self.gone = True
            raise Gone from error
        raise self.raised

    def _called(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Calls a function of the tests for the program."""
        function = self._lent[reply["call"]]
        args = [decode(arg, self._resolve) for arg in reply["args"]]
        try:
            return {"value": encode(function(*args), self._refer)}
        except Exception as error:
            known = (base.__name__ for base in type(error).__mro__ if hasattr(builtins, base.__name__))
            return {"raise": next(known)}

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return ["h", value._number]
        if not callable(value):
            self.unsupported = f"a value of type {type(value).__name__} cannot be given to the program"
            raise Unsupported(self.unsupported)
        self._lent.append(value)
        return ["k", len(self._lent) - 1]

    def _resolve(self, tag: str, content: Any) -> Any:
        if tag == "k":
            return self._lent[content]
        number, name, *known = content
        return self._class(name, known[0]) if known else Remote(self, int(number))

    def _class(self, name: str, known: str) -> type[Exception]:
        """An exception's class: Python's own, or one of the name that the program's has, below Python's nearest."""
        base = getattr(builtins, known, None)
        base = base if isinstance(base, type) and issubclass(base, Exception) else Exception
        if base.__name__ == name:
            return base
        return self._classes.setdefault((name, known), type(name, (base,), {}))


class Remote:
    """An object that lives in the program's process. It compares with others of its kind only, and has no order."""

    def __init__(self, program: Program, number: int) -> None:
        self.__dict__.update(_program=program, _number=number)

    def _ask(self, do: str, *args: Any, **named: Any) -> Any:
        return self._program.ask(do, self._number, *args, **named)

    def __call__(self, *args: Any, **named: Any) -> Any:  # noqa: D102
        return self._ask("call", *args, **named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._ask("delitem", key)

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __iter__(self) -> Iterator[Any]:
        items = self._ask("iter")
        while True:
            try:
                yield items._ask("next")
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._ask("next")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(self._ask("equal", other))

    def __hash__(self) -> int:
        return int(self._number)


def _become(target: Any, after: Any) -> None:
    """Makes the tests' own list, dict or set what the program made of its copy."""
    if isinstance(target, list) and isinstance(after, list):
        target[:] = after
    elif isinstance(target, (dict, set)) and type(target) is type(after):
        target.clear()
        target.update(after)
