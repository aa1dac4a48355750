"""The folders of reward models that rewards name, and what tables of scores record of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.artifacts import assets, lineage, model_files
from rloo_pipeline.artifacts.manifest import MANIFEST, digest

if TYPE_CHECKING:
    from rloo_pipeline.config import Reward


def folders_of(rewards: Iterable[Reward]) -> dict[str, Path]:
    """The folder of each reward model that a reward's option `model` names, by column, if it is on this machine."""
    named = {reward.column: reward.options for reward in rewards if reward.is_model and not reward.uses_own_model}
    here = {column: model_files.here(str(of["model"]), of.get("revision")) for column, of in named.items()}
    return {column: folder for column, folder in here.items() if folder}


def version_of(folder: Path) -> tuple[str, str]:
    """The footer key and the digest that identify a reward model. One that a run has trained has a manifest."""
    trained = (folder / MANIFEST).exists()
    return (
        (lineage.REWARD_MODELS, digest(folder / MANIFEST))
        if trained
        else (lineage.REWARD_FILES, assets.identity(folder))
    )
