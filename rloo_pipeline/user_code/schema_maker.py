"""`get_json_schema` of transformers without transformers, whose import takes a second and which images may lack.

Of what the file that defines it imports, schemas need the standard library alone, and the rest is replaced. Only the
process that makes schemas calls this; those of episodes do not.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

NAME = "transformers.utils.chat_template_utils"
OF_TYPES = {"PIL", "torch", "transformers"}
"""Modules whose types transformers can put into a schema. A tool can have such a type only if its code imports one."""


def installed_file() -> str:
    """The file of the installed transformers, found without its import."""
    package = importlib.util.find_spec("transformers")
    return str(Path(str(package and package.origin)).parent / "utils" / "chat_template_utils.py")


def load(file: str) -> None:
    """Makes the module of this file importable under its name.

    Args:
        file: `transformers/utils/chat_template_utils.py`.
    """
    absent = dict.fromkeys(("is_jinja_available", "is_torch_available", "is_vision_available"), lambda: False)
    _module("packaging", version=None)
    _module("transformers")
    _module("transformers.utils", logging=SimpleNamespace(get_logger=logging.getLogger))
    _module("transformers.utils.import_utils", **absent)
    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _module(name: str, **content: object) -> None:
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(content)
