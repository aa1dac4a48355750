"""Imports libraries without their slow optional dependencies, which no stage needs.

pyarrow imports pandas before its first array; DeepSpeed, transformers and vLLM import packages for parts that are not
used here. This takes seconds at the start of every stage. All four work without these packages, which are therefore
hidden during the import. User code and later imports find them as usual.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def prepare_arrow() -> None:
    """Makes pyarrow create its first array without importing pandas; a conversion to pandas imports it later."""
    import pyarrow

    class Hides:
        """An import hook: compiled code would accept the None that `hidden_packages` puts into sys.modules."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "pandas":
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Hides)
    try:
        pyarrow.array([0])
    finally:
        sys.meta_path.remove(Hides)


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """A block in which an attribute of a module or a class has another value."""
    original = inspect.getattr_static(owner, name)  # of a class method not what it is bound to
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def hidden_packages(*names: str) -> Iterator[None]:
    """Hides these packages from imports inside the block, unless they are imported already."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import of it fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


class _Later(ModuleType):
    """Placeholder for a package that is imported on first use."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:  # used inside the block
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def imported_later(name: str) -> Iterator[None]:
    """A block whose imports of a package do not import it yet, unless it is imported already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = _Later(name)
    try:
        yield
    finally:
        if isinstance(sys.modules.get(name), _Later):
            del sys.modules[name]
