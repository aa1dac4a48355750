"""The options that a script of TRL is called with, as its parser would read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rloo_pipeline.errors import UserError


def option_values(words: Sequence[str]) -> dict[str, Any]:
    """`--max_steps 400 --use_vllm` → {max_steps: 400, use_vllm: True}; the file of `--config` comes first.

    Raises:
        UserError: a word belongs to no option, or the file cannot be read.
    """
    found: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = _number(value) if equals else True
        elif name is None:
            raise UserError(f"--from-trl: '{word}' belongs to no option; write the options of the script as for python")
        elif found[name] is True:
            found[name] = _number(word)
        else:
            found[name] = [*(found[name] if isinstance(found[name], list) else [found[name]]), _number(word)]
    if file := found.pop("config", None):
        try:
            found = dict(yaml.safe_load(Path(str(file)).read_text(encoding="utf-8")) or {}) | found
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"--from-trl: --config {file} cannot be read ({error})") from error
    return found


def _number(word: str) -> Any:
    """A word of a command line as Python's number, boolean, dictionary or text."""
    try:
        return float(word) if "e" in word.lower() else yaml.safe_load(word)
    except (ValueError, yaml.YAMLError):
        return {"true": True, "false": False}.get(word.lower(), word)
