"""The examiner's proxy of the program under test: its names, objects and exceptions, reached over the wire.

Plain data is sent by value and compared here with this Python's own `==`. An object of one of the program's classes
stays in the program's process and is represented here by a `RemoteObject`, which never equals plain data.
"""

from __future__ import annotations

import builtins
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from types import CoroutineType
from typing import Any

from rloo_pipeline.user_code.sandbox.inside.wire import Wire, builtin_base, decode, decode_error, encode, encode_error

ENDS_OF_LOOPS: dict[type[Exception], str] = {StopIteration: "next", StopAsyncIteration: "anext"}
"""Exceptions that end a loop, and the operation that may raise them."""
CO_COROUTINE = 0x80
"""Code flag of an `async def` function, as in the module inspect."""
TEXT = "text of the program's exception"
"""Attribute that keeps the text of the program's own exceptions, whose classes may define `__str__`."""


class ProgramGone(BaseException):
    """The program's process died or sent an invalid message. Not an Exception, so that tests do not catch it by
    accident.
    """


class UnsupportedValue(BaseException):
    """The tests pass a value that the wire cannot carry."""


class ProgramProxy:
    """The program, reached over the wire."""

    def __init__(self, wire: Wire, text: str) -> None:
        self.ended = False
        self.unsupported: str | None = "the sandbox of the program did not start"
        self._raised: list[BaseException] = []
        self._wire = wire
        self._callbacks: list[Any] = []
        self._classes: dict[tuple[str, str], type[Exception]] = {}
        try:
            wire.send({"ready": None})
            wire.receive()
            self.unsupported = None
            wire.send({"program": text})
            self.ended = "value" not in wire.receive()
        except (OSError, EOFError, ValueError, TypeError):
            self.ended = True

    def name(self, name: str) -> Any:
        """The object of this name in the program; raises KeyError if it is missing."""
        return self._exchange({"do": "name", "name": name}, [])

    def request(self, do: str, on: int, /, *args: Any, **kwargs: Any) -> Any:
        """Performs an operation on an object of the program; its exceptions are raised here."""
        request = {
            "do": do,
            "on": on,
            "args": [encode(arg, self._refer) for arg in args],
            "named": {name: encode(arg, self._refer) for name, arg in kwargs.items()},
        }
        return self._exchange(request, list(args))

    def _exchange(self, request: dict[str, Any], args: list[Any]) -> Any:
        if self.ended:
            raise ProgramGone
        try:
            self._wire.send(request)
            while "call" in (reply := self._wire.receive()):
                self._wire.send(self._call_back(reply))
            if "raise" not in reply:
                for row, after in reply.get("changed", {}).items():
                    _replace_content(args[int(row)], decode(after, self._resolve))
                return decode(reply["value"], self._resolve)
            raised = self._error(request["do"], *reply["raise"])
        except UnsupportedValue:
            raise
        except Exception as error:  # an invalid message can raise anything
            self.ended = True
            raise ProgramGone from error
        self._raised.append(raised)
        raise raised

    def caused(self, error: BaseException | None) -> bool:
        """True if an exception came from the program, or was raised while handling one that did."""
        while error is not None and not any(error is raised for raised in self._raised):
            error = error.__context__
        return error is not None

    def _call_back(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Calls a function of the tests for the program."""
        function = self._callbacks[reply["call"]]
        args = [decode(arg, self._resolve) for arg in reply["args"]]
        kwargs = {name: decode(arg, self._resolve) for name, arg in reply["named"].items()}
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            return {"raise": encode_error(error)}
        try:
            return {"value": encode(result, self._refer)}
        except UnsupportedValue as error:  # the program chose these arguments, so the tests are not to blame
            self.unsupported = None
            return {"raise": encode_error(TypeError(str(error)))}

    def _refer(self, value: Any) -> Any:
        if isinstance(value, CoroutineType) and value.cr_code is _awaited.__code__:  # the program's own, passed back
            if value.cr_frame is None:
                raise TypeError("a coroutine of the program that has ended cannot be passed to it")
            value = value.cr_frame.f_locals["coroutine"]
        if isinstance(value, RemoteObject):
            return ["h", value._number]
        asynchronous = getattr(getattr(value, "__code__", None), "co_flags", 0) & CO_COROUTINE
        if asynchronous or not callable(value):
            kind = "coroutine function" if asynchronous else type(value).__name__
            self.unsupported = f"a value of type {kind} cannot be passed to the program"
            raise UnsupportedValue(self.unsupported)
        self._callbacks.append(value)
        return ["k", len(self._callbacks) - 1]

    def _resolve(self, tag: str, number: int, *names: str) -> Any:
        if tag == "k":
            return self._callbacks[number]
        if tag == "a":
            return _awaited(RemoteObject(self, int(number)))
        return self._class(*names) if names else RemoteObject(self, int(number))

    def _error(
        self, do: str, name: str, base_name: str, args: list[Any], attributes: dict[str, Any], text: str
    ) -> Exception:
        """Recreates an exception of the program. StopIteration is replaced where it would silently end a loop of the
        tests.
        """
        kind = self._class(name, base_name)
        ends_loop = next((end for end in ENDS_OF_LOOPS if issubclass(kind, end)), None)
        if ends_loop and do != ENDS_OF_LOOPS[ends_loop]:
            return RuntimeError(f"the program raised {name}")
        error = decode_error(kind, args, attributes)
        if kind.__name__ != base_name:
            vars(error)[TEXT] = str(text)
        return error

    def _class(self, name: str, base_name: str) -> type[Exception]:
        """The class of an exception: a builtin one, or a new class of the same name derived from the nearest builtin
        one.
        """
        base = getattr(builtins, base_name, None)
        base = base if isinstance(base, type) and issubclass(base, Exception) else Exception
        if base.__name__ == name:
            return base
        own = {"__str__": lambda error: vars(error).get(TEXT) or base.__str__(error)}
        return self._classes.setdefault((name, base_name), type(name, (base,), own))


async def _awaited(coroutine: RemoteObject) -> Any:
    """Awaits a coroutine of the program, which runs to completion in the program's process."""
    return coroutine._request("await")


def _forwarded(do: str, kind: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    """Makes a method that requests an operation and converts its result to a type."""

    def method(on: RemoteObject, /, *args: Any, **kwargs: Any) -> Any:
        result = on._request(do, *args, **kwargs)
        return result if kind is None else kind(result)

    return method


class RemoteObject:
    """An object in the program's process. It can equal only another RemoteObject, and is not ordered."""

    def __init__(self, program: ProgramProxy, number: int) -> None:
        self.__dict__.update(_program=program, _number=number)

    def _request(self, do: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._program.request(do, self._number, *args, **kwargs)

    __call__ = _forwarded("call")
    __setattr__ = _forwarded("setattr")
    __getitem__ = _forwarded("getitem")
    __setitem__ = _forwarded("setitem")
    __delitem__ = _forwarded("delitem")
    __contains__ = _forwarded("contains", bool)
    __enter__ = _forwarded("enter")
    __aiter__ = _forwarded("aiter")
    __next__ = _forwarded("next")
    __len__ = _forwarded("len", int)
    __bool__ = _forwarded("bool", bool)
    __str__ = _forwarded("str", str)
    __repr__ = _forwarded("repr", str)

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuses, because NumPy would otherwise compare an array that the program makes up, or an empty sequence."""
        raise TypeError("an object of the program's classes is not an array")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):
            raise AttributeError(name)
        return self._request("getattr", name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        with _suppressing(error):
            self._request("exit", kind and builtin_base(kind))

    def __await__(self) -> Any:
        return self._request("await")
        yield

    async def __anext__(self) -> Any:
        return self._request("anext")

    async def __aenter__(self) -> Any:
        return self._request("aenter")

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        with _suppressing(error):
            self._request("aexit", kind and builtin_base(kind))

    def __iter__(self) -> Iterator[Any]:
        items = self._request("iter")
        while True:
            try:
                yield items._request("next")
            except StopIteration:
                return

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and bool(self._request("equal", other))

    def __hash__(self) -> int:
        return int(self._number)


def _suppressing(error: BaseException | None) -> AbstractContextManager[None]:
    """Suppresses an exception from the program's `__exit__` if the tests' own error should propagate."""
    return nullcontext() if error is None else suppress(Exception)


def _replace_content(target: Any, after: Any) -> None:
    """Applies the changes that the program made to its copy to the tests' own list, dict or set."""
    if isinstance(target, list) and isinstance(after, list):
        target[:] = after
    elif isinstance(target, deque) and isinstance(after, deque):
        target.clear()
        target.extend(after)
    elif isinstance(target, (dict, set)) and type(target) is type(after):
        target.clear()
        target.update(after)
    elif type(target).__name__ == "ndarray" and type(target) is type(after) and target.shape == after.shape:
        target[...] = after
