"""The program's side: runs the program's text once, then does with its functions what the examiner asks.

Nothing here is trusted once the program's text has begun to run: this is its process, and it may change all of it. It
never sees an expected value or an assert, only the calls.
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

DOING: dict[str, Callable[..., Any]] = {
    "call": lambda on, *args, **named: on(*args, **named),
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
    """Serves one program until the examiner is gone."""
    apply(bounds)
    wire = Wire(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    module = ModuleType("solution")
    sys.modules["solution"] = module
    served = Served(wire, module.__dict__)
    wire.receive()  # is anybody here?
    wire.send({"value": None})
    text = wire.receive()["program"]
    begin()
    try:
        exec(compile(text, "solution.py", "exec"), module.__dict__)
    except BaseException as error:
        wire.send(served.failure(error))
        return
    wire.send({"value": None})
    while True:
        try:
            request = wire.receive()
        except EOFError:
            return
        wire.send(served.answer(request))


class Served:
    """The program's names, and what of its objects the examiner refers to."""

    def __init__(self, wire: Wire, names: dict[str, Any]) -> None:
        self._wire, self._names = wire, names
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does what is asked; the reply says what came of it, and which arguments it changed in place."""
        try:
            if request["do"] == "name":
                return {"value": self._encode(self._names[request["name"]])}
            args = [self._decode(arg) for arg in request["args"]]
            named = {name: self._decode(arg) for name, arg in request["named"].items()}
            given = DOING[request["do"]](self._kept[request["on"]], *args, **named)
            after = {row: self._encode(arg) for row, arg in enumerate(args) if isinstance(arg, (list, dict, set))}
            changed = {row: arg for row, arg in after.items() if arg != request["args"][row]}
            return {"value": self._encode(given), "changed": changed}
        except BaseException as error:
            return self.failure(error)

    def failure(self, error: BaseException) -> dict[str, Any]:
        """An exception by its class's name, the nearest class that everybody knows, and its words."""
        known = [base.__name__ for base in type(error).__mro__ if getattr(builtins, base.__name__, None) is base]
        words = error.args[0] if error.args and isinstance(error.args[0], str) else ""
        return {"raise": [type(error).__name__, known[0], str(words)]}

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _refer(self, value: Any) -> Any:
        number = self._numbers.setdefault(id(value), len(self._kept))
        if number == len(self._kept):
            self._kept.append(value)
        known = []
        if isinstance(value, type) and issubclass(value, Exception):
            known = [base.__name__ for base in value.__mro__ if getattr(builtins, base.__name__, None) is base]
        return ["h", [number, getattr(value, "__name__", "") if known else "", *known[:1]]]

    def _decode(self, message: Any) -> Any:
        return decode(message, lambda tag, number: self._kept[number] if tag == "h" else self._of_examiner(number))

    def _of_examiner(self, number: int) -> Any:
        """A function of the tests, given as an argument: calling it asks the examiner."""

        def call(*args: Any) -> Any:
            self._wire.send({"call": number, "args": [self._encode(arg) for arg in args]})
            while "do" in (reply := self._wire.receive()):  # the function may call the program in its turn
                self._wire.send(self.answer(reply))
            if "raise" in reply:
                raise getattr(builtins, reply["raise"])
            return self._decode(reply["value"])

        return call
