"""The contract of environments and tools: that of TRL's GRPOTrainer 1.16 (`environment_factory` and `tools`).

An environment is a class without constructor arguments, or a function that returns an instance. `reset(**row)` begins
an episode and returns text for the end of the last user message, or None. Public methods are tools; `get_reward()` is
optional and returns a number or None. A tool in `tools` is a plain function. Tools have types and a Google docstring,
from which `transformers.utils.get_json_schema` makes the schema that the model sees.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline import import_string
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.transformers_internals import optional_parts
from rloo_pipeline.user_code.reward_call import signature_of

OWN_METHODS = ("reset", "get_reward")
"""Public methods of an environment that are not tools."""
OF_TYPES = {"PIL", "torch", "transformers"}
"""Modules whose types transformers can put into a schema. A tool can use such types only if it has imported the
module.
"""


class EnvironmentCode(NamedTuple):
    """The imported environments and tools of a run."""

    environments: dict[str, tuple[str, Callable[..., Any]]]
    """Import string and class of each environment, by name; the name is empty if all rows have the same environment."""
    tools: dict[str, tuple[str, Callable[..., Any]]]
    """Import string and function of each tool, by the name that the model calls."""


class ToolSet(NamedTuple):
    """The tools that the model can call in an environment, or without one."""

    schemas: list[dict[str, Any]]
    """JSON schemas for the chat template, in TRL's order: functions in `tools`, then methods by name."""
    gives_reward: bool
    """True if the environment has `get_reward`."""


def by_name(environment: str | Mapping[str, str] | None) -> dict[str, str]:
    """Import strings of environments by name; the name is empty if all rows have the same environment."""
    if environment is None:
        return {}
    return {"": environment} if isinstance(environment, str) else dict(environment)


def load(environments: Mapping[str, str], tools: Iterable[str]) -> EnvironmentCode:
    """Imports environments and tools.

    Args:
        environments: import strings by name, from `by_name`.
        tools: import strings of functions.

    Raises:
        UserError: one of them cannot be imported or is of the wrong kind, or two tools have the same name.
    """
    functions: dict[str, tuple[str, Callable[..., Any]]] = {}
    imported: dict[Path, Any] = {}
    for reference in tools:
        function = import_string.load(reference, imported)
        if isinstance(function, type) or not hasattr(function, "__name__"):
            raise UserError(
                f"'{reference}': not a function; a tool must be one, and a class belongs in rollout.environment"
            )
        if function.__name__ in functions:
            raise UserError(f"'{reference}': two of rollout.tools are called {function.__name__}; rename one of them")
        functions[function.__name__] = reference, function
    classes = {name: (reference, import_string.load(reference, imported)) for name, reference in environments.items()}
    return EnvironmentCode(classes, functions)


def tool_sets(code: EnvironmentCode) -> dict[str, ToolSet]:
    """The tools of each environment, by its name. Without environments, the only key is the empty name.

    Raises:
        UserError: an environment or a tool violates the contract.
    """
    functions = [_schema(tool, f"'{reference}'") for reference, tool in code.tools.values()]
    if not code.environments:
        return {"": ToolSet(functions, False)}
    return {name: _tool_set(*entry, code.tools, functions) for name, entry in code.environments.items()}


def _tool_set(
    reference: str, factory: Callable[..., Any], tools: Mapping[str, object], functions: list[dict[str, Any]]
) -> ToolSet:
    if needed := signature_of(factory).required:
        name = f"{factory.__name__}.__init__" if isinstance(factory, type) else factory.__name__
        raise UserError(
            f"'{reference}': {name} needs {' and '.join(map(repr, needed))}, and an environment is made without "
            "arguments; give defaults, or read values from variables of the module"
        )
    kind = factory if isinstance(factory, type) else type(factory())
    methods = dict(inspect.getmembers(kind, predicate=inspect.isfunction))
    if "reset" not in methods:
        raise UserError(f"'{reference}': {kind.__name__} has no method reset; add `def reset(self, **row)`")
    schemas = list(functions)
    for name in tool_methods(kind):
        if name in tools:
            raise UserError(f"'{reference}': {kind.__name__}.{name} has the name of one of rollout.tools; rename it")
        schemas.append(_schema(methods[name], f"'{reference}': {kind.__name__}.{name}"))
    return ToolSet(schemas, "get_reward" in methods)


def with_tools(kind: type, tools: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]], **attributes: Any) -> type:
    """Subclasses an environment class to add tools with given schemas.

    Args:
        kind: class with the other methods.
        tools: methods by name, each with the JSON schema of a function: `name`, `description`, `parameters`.
        attributes: other attributes of the class.

    Raises:
        UserError: a tool's name is already an attribute, or begins with `_`.
    """
    for name, (method, function) in tools.items():
        if name in dir(kind()) or name.startswith("_"):
            raise UserError(f"rollout.environment: a tool is named {name}, which episodes use themselves; rename it")
        method.json_schema = {"type": "function", "function": function}  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {**{name: method for name, (method, _) in tools.items()}, **attributes})


def tool_methods(kind: type) -> list[str]:
    """Names of the environment's methods that are tools, as in TRL: the class's public functions, in order of name."""
    members = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in OWN_METHODS]


def _schema(tool: Callable[..., Any], label: str) -> dict[str, Any]:
    """The JSON schema of a tool.

    Raises:
        UserError: a type or a part of the docstring is missing. The message begins with `label`.
    """
    if ready := getattr(tool, "json_schema", None):
        return dict(ready)
    try:
        schema: dict[str, Any] = optional_parts.schema_maker().get_json_schema(tool)
    except Exception as error:
        reason = one_line(" ".join(map(str, error.args)), 500)
        raise UserError(
            f"{label} gives no schema ({type(error).__name__}: {reason}); give each argument a type that JSON has "
            "(str, int, float, bool, list, dict) and describe it under `Args:` of the docstring"
        ) from error
    return schema
