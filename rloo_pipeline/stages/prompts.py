"""prompts: dataset rows → templated, tokenized prompts in Arrow (`train/`, `dev/`, `eval/`) and counts (`counts.json`).

With tools, prompts list the tools and end with the observation of their environment; `tools.json` has the tools.

A prompt_id is a hash of the row's content, so it is the same in every run and in any order. A training row whose prompt
is also a held-out one is dropped, as is a row of dev whose prompt is also in eval. Dropped rows are counted by reason.
Images are in `images/`, each once; a prompt names them by digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.artifacts import assets as asset_files
from rloo_pipeline.artifacts import image_store, lineage
from rloo_pipeline.artifacts.files import atomic_folder, write_json
from rloo_pipeline.artifacts.manifest import write_manifest
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import TOOLS, packed
from rloo_pipeline.before_run import model_inputs
from rloo_pipeline.config import Config
from rloo_pipeline.data.rows import read_rows
from rloo_pipeline.rollout import resets
from rloo_pipeline.rollout.templating import PromptParts, Templater, shown
from rloo_pipeline.runtime.progress import say

if TYPE_CHECKING:
    from datasets import Dataset

COUNTS = "counts.json"


def prompts(config: Config, assets: Path, output: Path) -> None:
    """Writes the prompts of a run.

    Args:
        config: the stage's configuration.
        assets: folder that `stage-assets` wrote.
        output: folder to write.

    Raises:
        UserError: a column is missing, no prompt is left, a prompt would begin with two BOS tokens, a template fails,
            or the longest prompt and completion exceed the model's context.
    """
    places = asset_files.read(assets, "model", "eval", "train", weights=False)
    model = Policy(Path(places["model"]["path"]), config.model.trust_remote_code)
    model_inputs.check_images(config.dataset, model.config, str(model))
    with ExitStack() as stack:
        uses_tools = config.rollout.uses_tools
        pool = stack.enter_context(resets.pool_of(config.rollout)) if uses_tools else None
        templater = Templater(config.dataset, model, pool)
        parts = PromptParts(templater, model.config)
        sets: dict[str, Dataset] = {}
        for name in parts.order:
            path = places[name]["path"]
            sets[name] = packed(parts.kept(name, read_rows(config.dataset.parts[name], path), path), path)
    model_inputs.check_context(config, model.config, parts.longest, str(model))
    with atomic_folder(output) as temporary:
        for name, part in sets.items():
            part.save_to_disk(str(temporary / name))
        write_json(temporary / COUNTS, parts.counts)
        if uses_tools:
            write_json(temporary / TOOLS, templater.tools)
        if config.dataset.image_column is not None:
            _save_images(config.dataset.image_column, templater, sets.values(), temporary)
        write_manifest(temporary, assets=lineage.assets_digest(assets))
    for name in config.dataset.parts:
        say(f"prompts/{name}: {shown(parts.counts[name])}")


def _save_images(column: str, templater: Templater, sets: Iterable[Dataset], folder: Path) -> None:
    """Writes the images of the rows that are kept."""
    of_rows = [ids for part in sets for ids in part.data.table[image_store.IDS].to_pylist()]
    digests = dict.fromkeys(digest for ids in of_rows for digest in ids)
    files = {digest: templater.files[digest] for digest in digests}
    image_store.write(folder, files, image_store.About(column, templater.single, max(map(len, of_rows))))
    say(f"prompts/images: {len(files)} images, {sum(map(len, files.values())) / 1e6:.1f} MB")
