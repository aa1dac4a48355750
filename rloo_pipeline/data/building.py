"""Models that a function named in the configuration builds (`model.build`, `algorithm.teacher.build`)."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rloo_pipeline import import_string
from rloo_pipeline.config import Model, ModelSource
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.seeds import derive
from rloo_pipeline.transformers_internals import optional_parts


@contextmanager
def named_in_errors(model: ModelSource, folder: Path) -> Iterator[None]:
    """Lets errors about a model that was built name its function, since its folder is temporary."""
    try:
        yield
    except UserError as error:
        if model.build is None:
            raise
        named = str(error).replace(str(folder / "config.json"), model.build).replace(str(folder), model.build)
        raise UserError(named) from error


def build(model: Model, seed: int, data_dir: str | None, folder: Path, key: str = "model") -> None:
    """Calls the function `model.build` to write a model into a folder.

    Args:
        model: the section of the configuration.
        seed: the run's seed.
        data_dir: the folder of the datasets, for functions with a parameter `data_dir` that read files from it, such as
            the corpus of a tokenizer.
        folder: folder to write the model to.
        key: the section's key in the configuration, for its seed and for messages.

    Raises:
        UserError: the function does not exist, does not take these options, or raised an exception.
    """
    name = str(model.build)
    optional_parts.prepare_transformers()  # the function's file imports models of transformers
    function = import_string.load(name)
    optional = {"data_dir": data_dir} if "data_dir" in inspect.signature(function).parameters else {}
    try:
        function(folder, derive(seed, key), **{**optional, **model.build_options})
    except (UserError, ImportError):
        raise
    except Exception as error:
        where = import_string.error_location(error, name)
        if isinstance(error, TypeError) and not where:
            raise UserError(f"{key}.build_options do not fit {name}: {error}") from error
        message = one_line(f"{type(error).__name__}: {error}", 300)
        raise UserError(f"{key}.build: {name} raised {message}{where}") from error
