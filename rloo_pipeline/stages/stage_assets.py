"""stage-assets: model and datasets → local folders at a pinned revision.

Writes `assets.json` with the path and revision of each source, and the model if the configuration builds one. All other
stages read it. Besides this one, only `stage_harness` fetches from the Hub. In other stages, the user's functions, such
as a judge or an environment, and trackers may use the network.
"""

import os
from pathlib import Path

from rloo_pipeline import import_string
from rloo_pipeline.artifacts import assets as asset_files
from rloo_pipeline.artifacts.files import atomic_folder
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import dataset_inputs, model_inputs
from rloo_pipeline.config import Config, Source, distillation
from rloo_pipeline.data.building import build, named_in_errors
from rloo_pipeline.errors import UserError, one_line, raise_disk_error
from rloo_pipeline.runtime.progress import say

WEIGHTS_AND_TEXT = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]


def stage_assets(config: Config, output: Path) -> None:
    """Finds, fetches or builds the model and the datasets of a run.

    Args:
        config: the stage's configuration.
        output: folder for assets.json and a model that is built.

    Raises:
        UserError: a model or dataset does not exist, cannot be fetched, or does not fit the configuration.
    """
    sources = config.row_sources
    for key, source in sources.items():
        dataset_inputs.columns(config, key, source)
    with atomic_folder(output) as temporary, named_in_errors(config.model, temporary / "model"):
        student, model = _model(config, temporary, output)
        model_inputs.check_model(config, student)
        assets = {"model": model}
        for name, of_teacher in config.teachers.items():
            asset = distillation.asset_of(name)
            teacher, assets[asset] = _model(of_teacher, temporary, output, distillation.key_of(name), asset)
            with named_in_errors(of_teacher.model, temporary / asset):
                model_inputs.check_teacher(of_teacher, teacher, student)
        if config.reward_model is not None and config.reward_model.own_source:
            own = config.of_reward_model.override({"update.lora": None})
            start, assets["reward_model"] = _model(own, temporary, output, "reward_model", "reward_model")
            with named_in_errors(own.model, temporary / "reward_model"):
                model_inputs.check_model(own, start)
        names = {key: dataset_inputs.asset_name(key) for key in sources}
        assets |= {names[key]: _source(key, source, config.data_dir) for key, source in sources.items()}
        asset_files.write(temporary, assets, output, seed=config.seed)
    paths = "; ".join(f"{name} {assets[name]['path']}" for name in names.values())
    say(f"assets: model {assets['model']['path']}; {paths}")


def _model(
    config: Config, temporary: Path, output: Path, key: str = "model", name: str = "model"
) -> tuple[Policy, dict[str, str | None]]:
    """Finds or builds a model; returns it at its present place, and its path and revision (None if unknown).

    Args:
        config: the configuration of a run that uses this model.
        temporary: folder to build in.
        output: folder that `temporary` becomes.
        key: its key in the configuration, for messages.
        name: its folder in `temporary`, if it is built.
    """
    model = config.model
    if model.build is not None:
        build(model, config.seed, config.data_dir, temporary / name, key)
        return Policy(temporary / name, model.trust_remote_code), {"path": str(output / name), "revision": None}
    if folder := model_inputs.local_model(config.model, key):
        return Policy(folder, model.trust_remote_code), {"path": str(folder), "revision": None}
    path, revision = _snapshot(str(model.name_or_path), "model", model.revision, WEIGHTS_AND_TEXT)
    return Policy(Path(path), model.trust_remote_code), {"path": path, "revision": revision}


def _source(key: str, source: Source, data_dir: str | None) -> dict[str, str | None]:
    if source.generator is not None:
        import_string.source_of(source.generator)
    if source.name is not None and not (Path(data_dir or ".") / source.name).is_dir():
        path, revision = _snapshot(source.name, "dataset", source.revision, None)
        return {"path": path, "revision": revision}
    return {"path": dataset_inputs.data_place(data_dir, key, source), "revision": None}


def _snapshot(name: str, kind: str, revision: str | None, patterns: list[str] | None) -> tuple[str, str]:
    """Fetches a Hub repository. Returns its local folder, and the commit, which names the folder."""
    # huggingface_hub reads the variable on import; all stages but this one and stage-harness set it to 1
    os.environ["HF_HUB_OFFLINE"] = os.environ.get("RLOO_ASSETS_OFFLINE", "0")
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    say(f"fetching {kind} {name} ({revision or 'newest revision'})")
    try:
        path = snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=patterns)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise_disk_error(error, Path(HF_HUB_CACHE))
        reason = one_line(error)
        raise UserError(
            f"{kind} '{name}' is neither a local folder nor could it be fetched from the Hub ({reason}); run this "
            "stage where there is internet (a login node), or give a local folder"
        ) from error
    return path, Path(path).name
