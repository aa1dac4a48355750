"""Base class of all sections of the configuration."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain, product
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rloo_pipeline.runtime.installation import csv_rows

Dtype = Literal["float32", "bfloat16", "float16"]
OptimizerName = Literal["adamw", "adamw_8bit", "adafactor", "muon"]
Beta = Annotated[float, Field(ge=0, lt=1)]
JSON = dict[str, Any]
OR_ONE = BeforeValidator(lambda values: [values] if isinstance(values, str) else values)
"""A list of strings may also be a single string, as in transformers."""
LARGEST: Mapping[type, float] = {int: 2**63 - 1, float: 3.4e38}
"""Largest numbers that tensors hold: those of int64 and float32. Seeds may be larger: they are only hashed."""
S = TypeVar("S", bound="Section")


def check_reference(name: str) -> str:
    """Returns the name if it has the form of a function's; otherwise raises ValueError."""
    module, _, function = name.rpartition(":")
    if not module or not function:
        raise ValueError(f"'{name}' names nothing in a file; write `module:name` or `path/file.py:name`")
    return name


Reference = Annotated[str, AfterValidator(check_reference)]
"""Name of a function or class, as `import_string` reads it."""


BY_RUN = "by run"
"""Validation context of what a run wrote, or an experiment's base: keys may be set that have no effect."""


class Unused(str):
    """A problem of a key that has no effect."""


EXCLUDED = "config/excluded.csv"
"""Keys of a section, also of sections inside, and others that cannot be used with any of them. KEY: VALUE stands for
that value, and KEY for any other than the default. The reason is a clause that follows the other key; it is empty for
what is not supported yet.
"""
UNUSED = "config/unused.csv"
"""Keys of a section that nothing reads with a value of another one, or without that one."""


class Section(pydantic.BaseModel):
    """A section of the configuration. It is immutable and refuses unknown keys, NaN, infinity, numbers that no
    tensor holds, booleans for numbers, the conflicts that `EXCLUDED` and `_problems` name, and keys that nothing reads
    in some combinations (`UNUSED`).
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    def changed(self, *keys: str) -> list[str]:
        """Those of these keys whose values are not the defaults."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]

    def _problems(self) -> Iterator[str]:
        """Yields a sentence for each conflict between keys; called once each key is valid by itself."""
        yield from ()

    @pydantic.field_validator("*", mode="wrap")
    @classmethod
    def _refuse_other_numbers(
        cls, value: Any, check: pydantic.ValidatorFunctionWrapHandler, info: pydantic.ValidationInfo
    ) -> Any:
        checked = check(value)
        both = isinstance(value, list) and isinstance(checked, list | tuple)
        pairs: list[tuple[Any, Any]] = [*zip(value, checked, strict=False)] if both else [(value, checked)]
        if any(isinstance(given, bool) and type(taken) in (int, float) for given, taken in pairs):  # pydantic takes 1
            raise PydanticCustomError("boolean", "must be a number, and YAML reads yes, no, on and off as booleans")
        for _, taken in pairs:
            largest = LARGEST.get(type(taken))
            if largest is not None and abs(taken) > largest and info.field_name not in ("seed", "seeds"):
                raise PydanticCustomError("large", f"must be from -{largest:g} to {largest:g}")
        return checked

    def unused(self, keys: tuple[str, ...], reason: str) -> Iterator[str]:
        """A sentence for each of these keys that is set, though nothing reads it, for this reason."""
        yield from (Unused(f"{key} has no effect {reason}, or leave {key} out") for key in self.changed(*keys))

    def _setting(self, name: str) -> str | None:
        """The key, with its value if that is a number or a word, if it is set as a name in `EXCLUDED` says."""
        key, _, asked = name.partition(": ")
        *sections, last = key.split(".")
        owner: Any = self
        for section in sections:
            owner = getattr(owner, section, None)
        value = getattr(owner, last, None)
        if asked:
            return name if str(value).lower() == asked else None
        if not value or not owner.changed(last):
            return None
        return f"{key}: {value}" if isinstance(value, str | int | float) and value is not True else key

    @classmethod
    @cache
    def _rows(cls, table: str) -> list[dict[str, str]]:
        """The rows of a table about this section, or one that it extends."""
        names = {section.__name__ for section in cls.__mro__}
        return [row for row in csv_rows(table) if row["section"] in names]

    def _conflicts(self) -> Iterator[str]:
        """A sentence for each pair of keys that cannot be used together."""
        for row in self._rows(EXCLUDED):
            why = f", {row['reason']}" if row["reason"] else " yet"
            pairs = product(*(filter(None, map(self._setting, row[side].split(", "))) for side in ("keys", "others")))
            yield from (f"{key} cannot be used with {other}{why}; change one of the two" for key, other in pairs)

    def _unread(self) -> Iterator[str]:
        """A sentence for each key that is set, though another key makes nothing read it."""
        for row in self._rows(UNUSED):
            if self._setting(row["with"]) if row["with"] else not getattr(self, row["without"]):
                yield from self.unused(tuple(row["keys"].split(", ")), row["reason"])

    @pydantic.model_validator(mode="after")
    def _refuse_first_problem(self, info: pydantic.ValidationInfo) -> Self:
        for problem in chain(self._conflicts(), self._problems(), self._unread()):
            if not (info.context == BY_RUN and isinstance(problem, Unused)):
                raise ValueError(problem)
        return self


def with_fields(fields: JSON) -> Callable[[type[S]], type[S]]:
    """Adds fields to a section, by name: type and default. Type checkers see the class as it is written."""

    def add(section: type[S]) -> type[S]:
        return pydantic.create_model(
            section.__name__, __base__=section, __doc__=section.__doc__, __module__=section.__module__, **fields
        )

    return add


def section_in(annotation: Any) -> type[Section] | None:
    """The section class in a field's annotation: alone, optional, or as the entries of a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((section for part in get_args(annotation) if (section := section_in(part))), None)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> JSON:
    """`base` with the values of `changes`; mappings in both are merged key by key, as Snakemake's `--config` does."""
    merged = {**base, **changes}
    for key, value in base.items():
        if isinstance(value, Mapping) and isinstance(changes.get(key), Mapping):
            merged[key] = merge(value, changes[key])
    return merged


def flatten(section: Mapping[str, Any], prefix: str = "") -> JSON:
    """Flattens nested keys into dotted ones; an empty mapping counts as a value."""
    flat: JSON = {}
    for key, value in section.items():
        nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def nest(flat: Mapping[str, Any]) -> JSON:
    """The inverse of `flatten`."""
    nested: JSON = {}
    for key, value in flat.items():
        first, dot, rest = key.partition(".")
        nested = merge(nested, {first: nest({rest: value}) if dot else value})
    return nested
