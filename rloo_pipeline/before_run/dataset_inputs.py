"""Checks the datasets that a configuration names: files exist, can be read, and have the right columns."""

from pathlib import Path

from rloo_pipeline.config import Config, Source, distillation
from rloo_pipeline.data import rows, text_rows
from rloo_pipeline.data.prompting import COMPLETION, check_column, check_columns, check_names
from rloo_pipeline.errors import UserError, did_you_mean, one_line, unexpanded

DEMONSTRATIONS = "warmstart.sft.demonstrations"
PREFERENCES = "reward_model.train"
HELD_OUT_PREFERENCES = "reward_model.eval"


def asset_name(key: str) -> str:
    """The name of a source in assets.json."""
    return key if key in (PREFERENCES, HELD_OUT_PREFERENCES) else key.rpartition(".")[2]


def data_file(key: str, source: Source, data_dir: str | None) -> Path | None:
    """Checks and returns the file of a source; None if the source is not a file.

    Raises:
        UserError: the file is missing, unreadable, empty or of an unknown format, or `name` is a path that is not a
            folder.
    """
    folder = Path(data_dir or ".")
    if source.name is not None and not (folder / source.name).is_dir():
        require_hub_name(source.name, folder / source.name, f"{key}.name")
    if source.path is None:
        return None
    path = folder / source.path
    if path.is_dir():
        raise UserError(f"{path}: is a folder, but {key}.path must name a file; write `name` instead of `path`")
    if not path.is_file():
        siblings = (file.name for file in path.parent.glob("*")) if path.parent.is_dir() else ()
        origin = f"{key}.path '{source.path}', data_dir '{data_dir or '.'}'"
        suggestion = did_you_mean(path.name, siblings) + unexpanded(str(path))
        raise UserError(f"{path}: no such dataset file ({origin}, relative to {Path.cwd()}){suggestion}")
    rows.check_file(path)
    return path


def require_hub_name(name: str, folder: Path, key: str) -> None:
    """Checks that a name that is not a local folder can be a Hub id.

    Args:
        name: name in the configuration.
        folder: local folder that the name could also mean.
        key: configuration key, for messages.

    Raises:
        UserError: the name is the path of a file, or of a folder that is missing, or the Hub has no such names.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if folder.is_file():
        raise UserError(f"{folder}: is a file, but {key} must name a folder; correct it")
    parts = Path(name).parts
    if name.startswith(("/", ".", "~", "$")) or len(parts) > 2 or (len(parts) == 2 and folder.parent.is_dir()):
        suggestion = did_you_mean(folder.name, (file.name for file in folder.parent.glob("*"))) + unexpanded(
            str(folder)
        )
        raise UserError(f"{folder}: no such folder ({key}, relative to {Path.cwd()}){suggestion}")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise UserError(
            f"{name}: neither a folder (relative to {Path.cwd()}) nor a Hub id such as org/name; correct {key}"
        ) from None


def data_place(data_dir: str | None, key: str, source: Source) -> str | None:
    """Location of a source's rows: a file, a folder, a snapshot in the Hub's cache, or the import string of a
    generator. None if they are not downloaded yet.

    Raises:
        UserError: as for `data_file`.
    """
    if source.generator is not None:
        return source.generator
    path = data_file(key, source, data_dir)
    if path is None:
        name = str(source.name)
        folder = Path(data_dir or ".") / name
        path = folder if folder.is_dir() else cached(name, source.revision, "dataset")
    return None if path is None else str(path)


def training_rows(config: Config, key: str = "dataset.train") -> int | None:
    """Number of rows of a source; None if they are not downloaded yet, or their reader is not installed here.

    Raises:
        UserError: they cannot be read.
    """
    source = config.row_sources[key]
    place = data_place(config.data_dir, key, source)
    try:
        return None if place is None else len(rows.read_rows(source, place))
    except ImportError:
        return None


def cached(name: str, revision: str | None, kind: str) -> Path | None:
    """The snapshot of a Hub repository in the local cache; None if there is none.

    Args:
        name: Hub id.
        revision: commit, tag or branch.
        kind: `model` or `dataset`.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, repo_type=kind, local_files_only=True))
    except Exception:  # the Hub's exceptions differ between versions; here all of them mean that it is not cached
        return None


def columns(config: Config, key: str, source: Source) -> list[str] | None:
    """The columns of a file, taken from its first row. None if the source is not a file, or would have to be read
    completely.

    Raises:
        UserError: the file is missing, its first row cannot be read, or a column that the configuration names is
            missing.
    """
    path = data_file(key, source, config.data_dir)
    names = None if path is None else _first_columns(path)
    if names is not None:
        check_source_columns(config, key, names, str(path))
    return names


def check_source_columns(config: Config, key: str, names: list[str], path: str) -> None:
    """Checks that a source has the columns that the configuration names.

    Raises:
        UserError: one is missing, or its name is reserved for the tables of a run.
    """
    if key in (PREFERENCES, HELD_OUT_PREFERENCES):
        for name in ("chosen", "rejected"):
            check_column(name, names, "preferences need it", path)
        return
    check_columns(names, config.dataset, path)
    if key == "dataset.train" and config.algorithm.teacher is not None and config.algorithm.teacher.models:
        check_column(distillation.COLUMN, names, "algorithm.teacher.models", path)
    if key != DEMONSTRATIONS:
        check_names(names, config.dataset, path)
    elif config.warmstart.sft is not None:
        check_column(config.warmstart.sft.completion_column, names, COMPLETION, path)


def _first_columns(path: Path) -> list[str] | None:
    if path.suffix in text_rows.SUFFIXES:
        first = next(text_rows.objects(path), None)
        if first is None:
            raise UserError(f"{path}: is empty; give it rows")
        return list(first.row)
    try:
        import pyarrow.parquet

        return list(pyarrow.parquet.read_schema(path).names)
    except ImportError:  # not installed if only the controller runs here
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: truncated or damaged ({one_line(error)})") from error
