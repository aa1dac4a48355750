"""The options of a stage's command: the parameters of its function, explained by its docstring.

Reads the function's file, because importing it would import an engine before the command has prepared its environment.
"""

import ast
import re
from pathlib import Path
from typing import Any

from rloo_pipeline.cli.command import Option, option

STAGES = Path(__file__).parents[1] / "stages"
TYPES = {"int": int, "str": str}
"""Parameters of any other type are files or folders."""
EXPLAINED = re.compile(r"^ {4}(\w+(?:, \w+)*): (.+(?:\n {8}.+)*)", re.MULTILINE)
"""A parameter, or several, in the section `Args` of a docstring."""


def options_of(stage: str) -> tuple[Option, ...]:
    """The options of a stage, in the order of its function's parameters, without the configuration.

    Args:
        stage: name of the stage, and of its function in `stages/` but for dashes.
    """
    name = stage.replace("-", "_")
    text = (STAGES / f"{name}.py").read_text(encoding="utf-8")
    start = text.index(f"\ndef {name}(")
    end = text.index('"""', text.index('"""', start) + 3) + 3  # the end of the docstring
    (function,) = ast.parse(text[start:end]).body
    assert isinstance(function, ast.FunctionDef)
    abouts = dict[str, str]()
    for names, about in EXPLAINED.findall(ast.get_docstring(function) or ""):
        abouts |= dict.fromkeys(names.split(", "), " ".join(about.split()).removesuffix("."))
    _, *parameters = function.args.args
    optional = [one.arg for one in parameters[len(parameters) - len(function.args.defaults) :]]
    return tuple(
        _option(one.arg, ast.unparse(one.annotation or one), one.arg in optional, abouts.get(one.arg, ""))
        for one in parameters
    )


def _option(name: str, annotation: str, has_default: bool, about: str) -> Option:
    kind = annotation.removesuffix(" | None")
    required = not has_default and kind == annotation
    keywords: dict[str, Any] = {"type": TYPES.get(kind, Path), "required": required}
    if kind.startswith(("Sequence[", "list[")):
        keywords |= {"nargs": "+"} if required else {"nargs": "*", "default": []}
    elif not required:
        keywords["nargs"] = "?"  # a rule leaves it empty in runs without such a file
    if kind == "Policy":
        about += ": its folder, or that of `stage-assets` for the base model"
    word = name.strip("_")
    keywords |= {"dest": name, "metavar": word.upper()}
    return option(f"--{word.replace('_', '-')}", help=about.replace("%", "%%"), **keywords)
