"""stage-assets: model and datasets → local folders at a pinned revision. The only stage that may use a network.

Writes `assets.json`: where each source lies and at which revision, and beside it the model where the configuration
builds one. Every other stage reads this and runs offline.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from rloo_pipeline import references
from rloo_pipeline.config import Config, Model, Source
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import new_folder, write_json
from rloo_pipeline.progress import say
from rloo_pipeline.seeds import derive
from rloo_pipeline.training import model_support

ASSETS = "assets.json"
WEIGHTS_AND_TEXT = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]


def stage_assets(config: Config, output: Path) -> None:
    """Fetches or makes everything the run needs, into the folder `output` where it must be made.

    Raises:
        UserError: something named in the configuration is not there, or cannot be fetched; the model cannot be trained.
    """
    sources = {"train": config.dataset.train, "eval": config.dataset.eval}
    if config.warmstart.sft is not None:
        sources["demonstrations"] = config.warmstart.sft.demonstrations
    with new_folder(output) as beside:
        model = _model(config.model, config.seed, config.data_dir, beside)
        model_support.refuse_run(config, Path(model["path"] or beside / "model"))
        assets = {"model": {**model, "path": model["path"] or str(output / "model")}}
        assets |= {name: _source(source, config.data_dir) for name, source in sources.items()}
        write_json(beside / ASSETS, assets)
    say(f"assets: model {assets['model']['path']}; " + "; ".join(f"{name} {assets[name]['path']}" for name in sources))


def _model(model: Model, seed: int, data_dir: str | None, beside: Path) -> dict[str, str | None]:
    if model.build is not None:
        build = references.load(model.build)
        # A builder that reads files, such as a tokenizer's corpus, looks where the datasets are looked for.
        given = {"data_dir": data_dir} if "data_dir" in inspect.signature(build).parameters else {}
        try:
            build(beside / "model", derive(seed, "model"), **{**given, **model.build_options})
        except TypeError as error:
            raise UserError(f"model.build_options do not fit {model.build}: {error}") from error
        return {"path": None, "revision": None}
    name = str(model.name_or_path)
    if Path(name).is_dir():
        return {"path": name, "revision": None}
    return _snapshot(name, "model", model.revision, WEIGHTS_AND_TEXT)


def _source(source: Source, data_dir: str | None) -> dict[str, str | None]:
    if source.path is not None:
        path = Path(data_dir or ".") / source.path
        if not path.is_file():
            raise UserError(
                f"{path}: no such dataset file (dataset path '{source.path}', data_dir '{data_dir or '.'}')"
            )
        return {"path": str(path), "revision": None}
    if source.generator is not None:
        references.source_of(source.generator)
        return {"path": source.generator, "revision": None}
    name = str(source.name)
    folder = Path(data_dir or ".") / name
    if folder.is_dir():
        return {"path": str(folder), "revision": None}
    return _snapshot(name, "dataset", source.revision, None)


def _snapshot(name: str, kind: str, revision: str | None, patterns: list[str] | None) -> dict[str, str | None]:
    """A Hub repository as a local folder; the folder's name is the commit."""
    import os

    # the variable is read when huggingface_hub is imported, and this is the one stage that may go out
    os.environ["HF_HUB_OFFLINE"] = os.environ.get("RLOO_ASSETS_OFFLINE", "0")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    say(f"fetching {kind} {name} ({revision or 'newest revision'})")
    try:
        path = snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=patterns)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = " ".join(str(error).split())[:160]
        raise UserError(
            f"{kind} '{name}' is neither a local folder nor could it be fetched from the Hub ({why}); run this "
            "stage where there is internet (a login node), or give a local folder"
        ) from error
    return {"path": path, "revision": Path(path).name}
