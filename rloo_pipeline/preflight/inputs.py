"""What a configuration names, looked at as far as files and config.json tell: no torch, no engine, no network.

The same functions serve `rloo check`, `plan` and `doctor`, Snakemake before it plans, and the stage that uses a thing.
They change no result: each returns what it found, or raises a UserError.
"""

from __future__ import annotations

import io
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rloo_pipeline.artifacts import model_dims
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.config import Config, Source
from rloo_pipeline.data import building, json_rows, rows
from rloo_pipeline.data.prompting import COMPLETION, check_column, check_columns, check_names
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.training import model_support

DEMONSTRATIONS = "warmstart.sft.demonstrations"


def sources(config: Config) -> dict[str, Source]:
    """The datasets of a run by the key that names each."""
    found = {"dataset.train": config.dataset.train, "dataset.eval": config.dataset.eval}
    if config.warmstart.sft is not None:
        found[DEMONSTRATIONS] = config.warmstart.sft.demonstrations
    return found


def data_file(key: str, source: Source, data_dir: str | None) -> Path | None:
    """The file of a source that is one.

    Raises:
        UserError: it is not there, cannot be read, is empty, or is of no known format.
    """
    if source.path is None:
        return None
    path = Path(data_dir or ".") / source.path
    if not path.is_file():
        near = did_you_mean(path.name, (file.name for file in path.parent.glob("*"))) if path.parent.is_dir() else ""
        looked = f"{key}.path '{source.path}', data_dir '{data_dir or '.'}'"
        raise UserError(f"{path}: no such dataset file ({looked}, looked for from {Path.cwd()}){near}")
    rows.check_file(path)
    return path


def data_place(config: Config, key: str, source: Source) -> str | None:
    """Where a source's rows are read: a file, a folder, what is in the Hub's cache, or the function that makes them;
    None where they are still to be fetched.

    Raises:
        UserError: as `data_file`.
    """
    if source.generator is not None:
        return source.generator
    path = data_file(key, source, config.data_dir)
    if path is None:
        name = str(source.name)
        folder = Path(config.data_dir or ".") / name
        path = folder if folder.is_dir() else cached(name, source.revision, "dataset")
    return None if path is None else str(path)


def cached(name: str, revision: str | None, kind: str) -> Path | None:
    """The snapshot of a repository in the Hub's cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, repo_type=kind, local_files_only=True))
    except Exception:  # the Hub's own errors differ from version to version, and all of them say that it is not there
        return None


def columns(config: Config, key: str, source: Source) -> list[str] | None:
    """The columns of a source that is a file, as far as its first row tells; None where it would have to be read whole.

    Raises:
        UserError: the file is not there or its first row cannot be read, or a column that the configuration names is
            not in it.
    """
    path = data_file(key, source, config.data_dir)
    found = None if path is None else _first_columns(path)
    if found is not None:
        check_source_columns(config, key, found, str(path))
    return found


def check_source_columns(config: Config, key: str, names: list[str], path: str) -> None:
    """Whether a source has the columns that the configuration names.

    Raises:
        UserError: one is missing, or has a name that the tables of a run use themselves.
    """
    check_columns(names, config.dataset, path)
    if key in ("dataset.train", "dataset.eval"):
        check_names(names, config.dataset, path)
    elif config.warmstart.sft is not None:
        check_column(config.warmstart.sft.completion_column, names, COMPLETION, path)


def _first_columns(path: Path) -> list[str] | None:
    if path.suffix in rows.JSON:
        first = next(json_rows.objects(path), None)
        if first is None:
            raise UserError(f"{path}: is empty, there is no row in it")
        return list(first.row)
    try:
        import pyarrow.parquet
    except ImportError:  # the controller has none
        return None
    try:
        return list(pyarrow.parquet.read_schema(path).names)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: truncated or damaged ({' '.join(str(error).split())[:160]})") from error


def local_model(config: Config) -> Path | None:
    """The model's folder where the configuration names one; None where it is on the Hub, or a function makes it.

    Raises:
        UserError: the name is that of a folder, and it is not there or has no config.json.
    """
    name = config.model.name_or_path
    if name is None:
        return None
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise UserError(f"{name}: no config.json, so this is no model folder (model.name_or_path)")
        return path
    if name.startswith(("/", ".", "~")) or len(path.parts) > 2 or (len(path.parts) == 2 and path.parent.is_dir()):
        near = did_you_mean(path.name, (file.name for file in path.parent.glob("*")))
        home = "; ~ is not read as your home, write it out" if name.startswith("~") else ""
        raise UserError(f"{name}: no such folder (model.name_or_path, looked for from {Path.cwd()}){near}{home}")
    return None


def model_folder(config: Config) -> Path | None:
    """The folder with the model's config.json: the one that is named, or the one in the Hub's cache; None where a
    function makes it, or where it is still to be fetched.

    Raises:
        UserError: as `local_model`.
    """
    folder, name = local_model(config), config.model.name_or_path
    if folder is not None or name is None:
        return folder
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=config.model.revision)
    return Path(found).parent if isinstance(found, str) else None


def shape(config: Config) -> model_dims.ModelDims:
    """The sizes of the model that a configuration names; one that is built is built for a look at it.

    Raises:
        UserError: it is not on this machine, cannot be trained, or has no sizes of a transformer.
    """
    assets = Path("results") / config.run / "assets" / "model"
    if config.model.build is not None and (assets / "config.json").exists():
        return _trained(config, assets)
    if config.model.build is not None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # what libraries say to themselves
                    building.build(config.model, config.seed, config.data_dir, Path(folder))
            except ImportError as error:
                raise UserError(f"{config.model.build} needs the stages' environment here ({error})") from error
            return _trained(config, Path(folder))._replace(source=config.model.build)
    found = model_folder(config)
    if found is None:
        raise UserError(
            f"{config.model.name_or_path}: neither a folder nor in the Hub's cache; its config.json is enough to plan, "
            f"fetch that where there is internet: {fetch_config(config)}"
        )
    return _trained(config, found)


def _trained(config: Config, folder: Path) -> model_dims.ModelDims:
    model_support.refuse_run(config, folder)
    return model_dims.read(folder)


def check_model(config: Config, folder: Path) -> None:
    """Whether a model can be sampled from and trained as the configuration asks, by its config.json.

    Raises:
        UserError: training does not cover it, or its context is too short for the completions alone.
    """
    model_support.refuse_run(config, folder)
    check_context(config, read_json(folder / "config.json"), 1, str(folder))


def check_context(config: Config, facts: dict[str, Any], longest_prompt: int, path: str) -> None:
    """Whether prompts and completions fit the model's context.

    Args:
        config: of the run.
        facts: the model's config.json.
        longest_prompt: tokens of it, at least.
        path: for the message.

    Raises:
        UserError: they do not.
    """
    context = model_dims.context(facts)
    for key, tokens in completion_lengths(config).items():
        if context is not None and longest_prompt + tokens > context:
            prompt = "a prompt" if longest_prompt == 1 else f"the longest prompt ({longest_prompt} tokens)"
            raise UserError(
                f"{path}: the model's context is {context} tokens, {prompt} and {key} ({tokens}) do not fit into it; "
                f"lower {key}{'' if longest_prompt == 1 else ' or dataset.max_prompt_length'}, or take a model with a "
                "longer context"
            )


def completion_lengths(config: Config) -> dict[str, int]:
    """The longest completions in tokens, by key."""
    found = {"rollout.max_completion_length": config.rollout.max_completion_length}
    if config.evaluation.max_completion_length is not None:
        found["evaluation.max_completion_length"] = config.evaluation.max_completion_length
    return found


def tight_context(config: Config, facts: dict[str, Any]) -> str | None:
    """What there is to say where the longest prompts that are let in would not fit; the stage `prompts` will see."""
    context, longest = model_dims.context(facts), max(completion_lengths(config).values())
    if context is None or longest + config.dataset.max_prompt_length <= context:
        return None
    return (
        f"the model's context is {context} tokens: with completions of {longest} there is room for prompts of "
        f"{context - longest}, and dataset.max_prompt_length ({config.dataset.max_prompt_length}) lets in longer ones"
    )


class Seen(NamedTuple):
    """What was looked at, and what there is to say of it."""

    what: str
    problem: str = ""
    note: str = ""


def look_at_model(config: Config) -> Seen:
    """The model, as far as its config.json is here."""

    def see() -> str | None:
        folder = model_folder(config)
        if folder is None:
            return None
        check_model(config, folder)
        return tight_context(config, read_json(folder / "config.json"))

    return _seen("model", see)


def look(config: Config) -> Iterator[Seen]:
    """Everything that can be told in a moment.

    Yields:
        What was looked at; with a sentence where it cannot work, or where it may not.
    """
    yield look_at_model(config)
    for key, source in sources(config).items():
        yield _seen(key, partial(_see_columns, config, key, source))


def _see_columns(config: Config, key: str, source: Source) -> None:
    columns(config, key, source)


def _seen(what: str, see: Callable[[], str | None]) -> Seen:
    try:
        return Seen(what, note=see() or "")
    except UserError as error:
        return Seen(what, problem=str(error))


def refuse(config: Config) -> list[str]:
    """The same for who begins a run.

    Returns:
        What may go wrong, to be said.

    Raises:
        UserError: something cannot work.
    """
    seen = list(look(config))
    problems = [one.problem for one in seen if one.problem]
    if problems:
        more = f" (and {len(problems) - 1} more, which `rloo check` lists)" if len(problems) > 1 else ""
        raise UserError(problems[0] + more)
    return [one.note for one in seen if one.note]


def fetch_config(config: Config) -> str:
    """The command that fetches what planning needs of a Hub model: its config.json alone."""
    revision = ["--revision", config.model.revision] if config.model.revision else []
    return shlex.join(["hf", "download", str(config.model.name_or_path), "config.json", *revision])


def fetch_all(config: Config, words: str) -> str:
    """The command that fetches model and data; `words` name the configuration for Snakemake."""
    return f"snakemake --cores 1 {words} -- results/{config.run}/assets"
