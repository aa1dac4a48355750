"""The program's process: runs the program once, then makes the calls that the examiner requests.

Nothing here is trusted once the program runs: it may change everything in its own process. It sees calls, and never an
expected value or an assert.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rloo_pipeline.sandbox.inside.limits import apply, begin
from rloo_pipeline.sandbox.inside.wire import Wire, decode, encode

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda on, *args, **kwargs: on(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": lambda on, key: on[key],
    "setitem": lambda on, key, value: on.__setitem__(key, value),
    "delitem": lambda on, key: on.__delitem__(key),
    "len": len,
    "iter": iter,
    "next": next,
    "bool": bool,
    "str": str,
    "repr": repr,
    "equal": lambda on, other: bool(on == other),
}


def main(bounds: dict[str, int]) -> None:
    """Serves one program until the examiner exits."""
    apply(bounds)
    wire = Wire(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    module = ModuleType("solution")
    sys.modules["solution"] = module
    server = ProgramServer(wire, module.__dict__)
    wire.receive()  # the examiner asks whether this process is ready
    wire.send({"value": None})
    text = wire.receive()["program"]
    begin()
    try:
        exec(compile(text, "solution.py", "exec"), module.__dict__)
    except BaseException as error:
        wire.send(server.failure(error))
        return
    wire.send({"value": None})
    while True:
        try:
            request = wire.receive()
        except EOFError:
            return
        wire.send(server.answer(request))


class ProgramServer:
    """The program's names, and the objects to which the examiner has references."""

    def __init__(self, wire: Wire, names: dict[str, Any]) -> None:
        self._wire, self._names = wire, names
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Performs a request. The reply has the result or the exception, and the arguments changed in place."""
        try:
            if request["do"] == "name":
                return {"value": self._encode(self._names[request["name"]])}
            args = [self._decode(arg) for arg in request["args"]]
            kwargs = {name: self._decode(arg) for name, arg in request["named"].items()}
            result = OPERATIONS[request["do"]](self._objects[request["on"]], *args, **kwargs)
            after = {row: self._encode(arg) for row, arg in enumerate(args) if _changes_in_place(arg)}
            changed = {row: arg for row, arg in after.items() if arg != request["args"][row]}
            return {"value": self._encode(result), "changed": changed}
        except BaseException as error:
            return self.failure(error)

    def failure(self, error: BaseException) -> dict[str, Any]:
        """An exception as a reply: the name of its class, of the nearest builtin class, and its message."""
        base_names = [base.__name__ for base in type(error).__mro__ if getattr(builtins, base.__name__, None) is base]
        message = error.args[0] if error.args and isinstance(error.args[0], str) else ""
        return {"raise": [type(error).__name__, base_names[0], str(message)]}

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _refer(self, value: Any) -> Any:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        base_names = []
        if isinstance(value, type) and issubclass(value, Exception):
            base_names = [base.__name__ for base in value.__mro__ if getattr(builtins, base.__name__, None) is base]
        return ["h", [number, getattr(value, "__name__", "") if base_names else "", *base_names[:1]]]

    def _decode(self, message: Any) -> Any:
        return decode(message, lambda tag, number: self._objects[number] if tag == "h" else self._of_examiner(number))

    def _of_examiner(self, number: int) -> Any:
        """A function of the tests that was passed as an argument: calling it sends a request to the examiner."""

        def call(*args: Any) -> Any:
            self._wire.send({"call": number, "args": [self._encode(arg) for arg in args]})
            while "do" in (reply := self._wire.receive()):  # the function may itself call the program
                self._wire.send(self.answer(reply))
            if "raise" in reply:
                raise getattr(builtins, reply["raise"])
            return self._decode(reply["value"])

        return call


def _changes_in_place(value: Any) -> bool:
    return isinstance(value, (list, dict, set)) or type(value).__name__ == "ndarray"
