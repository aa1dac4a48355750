"""Models that a function of the configuration makes (`model.build`)."""

from __future__ import annotations

import inspect
from pathlib import Path

from rloo_pipeline.config import Model, import_string
from rloo_pipeline.errors import UserError
from rloo_pipeline.seeds import derive


def build(model: Model, seed: int, data_dir: str | None, folder: Path) -> None:
    """Has `model.build` write a model into a folder. A builder that reads files, such as a tokenizer's corpus, takes
    `data_dir` and looks where the datasets are looked for.

    Raises:
        UserError: the function is not there, its options do not fit, or it raised.
    """
    name = str(model.build)
    function = import_string.load(name)
    given = {"data_dir": data_dir} if "data_dir" in inspect.signature(function).parameters else {}
    try:
        function(folder, derive(seed, "model"), **{**given, **model.build_options})
    except (UserError, ImportError):
        raise
    except Exception as error:
        where = import_string.place(error, name)
        if isinstance(error, TypeError) and not where:
            raise UserError(f"model.build_options do not fit {name}: {error}") from error
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"model.build: {name} raised {said}{where}") from error
