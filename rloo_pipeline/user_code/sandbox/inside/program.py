"""The program's process: runs the program once, then makes the calls that the examiner requests.

Nothing in this process is trusted once the program runs, because the program can change all of it. It sees calls, but
never an expected value or an assert.
"""

from __future__ import annotations  # the Python of an image may be 3.9

import builtins
import functools
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from types import CoroutineType, ModuleType
from typing import Any

from rloo_pipeline.user_code.sandbox.inside.limits import apply, begin
from rloo_pipeline.user_code.sandbox.inside.wire import Wire, builtin_base, decode, decode_error, encode, encode_error


@functools.cache
def _event_loop() -> Any:
    """One event loop for all coroutines, because objects that the program keeps between calls are bound to it."""
    import asyncio

    return asyncio.new_event_loop()


def _wait(awaitable: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await awaitable

    return _event_loop().run_until_complete(wait())


def _exit(manager: Any, kind: type[BaseException] | None) -> tuple[Any, ...]:
    """The arguments of `__exit__`. A test's error is recreated without its message, which may reveal the answer."""
    return (manager, kind, kind and kind.__new__(kind), None)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda on, /, *args, **kwargs: on(*args, **kwargs),
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
    "contains": lambda on, item: item in on,
    "enter": lambda on: type(on).__enter__(on),
    "exit": lambda on, kind: type(on).__exit__(*_exit(on, kind)),
    "await": _wait,
    "aiter": lambda on: type(on).__aiter__(on),
    "anext": lambda on: _wait(type(on).__anext__(on)),
    "aenter": lambda on: _wait(type(on).__aenter__(on)),
    "aexit": lambda on, kind: _wait(type(on).__aexit__(*_exit(on, kind))),
}


def main(bounds: dict[str, int]) -> None:
    """Serves one program until the examiner exits."""
    apply(bounds)
    wire = Wire()
    module = ModuleType("solution")
    sys.modules["solution"] = module
    server = ProgramServer(wire, module.__dict__)
    wire.receive()  # the examiner waits for this process to be ready
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
    """Holds the program's names and the objects that the examiner references."""

    def __init__(self, wire: Wire, names: dict[str, Any]) -> None:
        self._wire, self._names = wire, names
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Performs a request. The reply has the result or exception, and any arguments that were changed in place."""
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
        """Encodes an exception as a reply."""
        return {"raise": encode_error(error)}

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _refer(self, value: Any) -> Any:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        if isinstance(value, CoroutineType):
            return ["a", number]
        is_exception = isinstance(value, type) and issubclass(value, Exception)
        return ["h", number, *([value.__name__, builtin_base(value).__name__] if is_exception else [])]

    def _decode(self, message: Any) -> Any:
        return decode(message, self._resolve)

    def _resolve(self, tag: str, number: int) -> Any:
        return self._objects[number] if tag == "h" else self._of_examiner(number)

    def _of_examiner(self, number: int) -> Callable[..., Any]:
        """Stands for a function of the tests that was passed as an argument. Calling it sends a request to the
        examiner.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            named = {name: self._encode(arg) for name, arg in kwargs.items()}
            self._wire.send({"call": number, "args": [self._encode(arg) for arg in args], "named": named})
            while "do" in (reply := self._wire.receive()):  # the function may call back into the program
                self._wire.send(self.answer(reply))
            if "raise" in reply:
                _, base_name, messages, *_ = reply["raise"]
                raise decode_error(getattr(builtins, base_name), messages, {})
            return self._decode(reply["value"])

        return call


def _changes_in_place(value: Any) -> bool:
    return isinstance(value, (list, dict, set, deque)) or type(value).__name__ == "ndarray"
