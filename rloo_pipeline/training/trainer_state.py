"""Trainer states on disk: DeepSpeed's checkpoint, the algorithm's state, the policy, and a manifest.

States are a cache: training from policy 0 recreates each of them (`retraining.py`). A worker therefore writes them
during the next rollouts, and skips some; only the newest is kept. An update that writes its state before it ends keeps
the one that it began from until the next update begins, or the report is written: if it is killed before Snakemake
knows that it has ended, it runs again.
"""

import os
import shutil
from pathlib import Path

from rloo_pipeline.artifacts import files, manifest, model_files
from rloo_pipeline.config import JSON
from rloo_pipeline.errors import UserError, naming, translate_write_errors
from rloo_pipeline.runtime import ranks
from rloo_pipeline.training.deepspeed_internals import deepspeed_config, nvme
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.settings import TrainerSettings

TAG = "state"
POLICY = model_files.STATE_POLICY
ALGORITHM_STATE = "carried.json"
KEYS = {"world": "deepspeed.processes", "zero_stage": "deepspeed.zero_stage (where 0 counts as 1 in 16-bit formats)"}
"""The configuration keys behind some facts about a state, by the name of the fact."""


class TrainerState:
    """The state of an engine, to be written before its next step."""

    def __init__(self, engine: Engine, algorithm_state: JSON, weights: Path | None = None, **about: object) -> None:
        """Takes the state without copying it; every rank takes part.

        Args:
            engine: the engine to save.
            algorithm_state: `AlgorithmState.to_json()`.
            weights: folder of the engine's policy; with it, the state remains usable after the policy has been removed.
            about: facts that `verify` must be given again, such as the round.
        """
        self.engine, self.algorithm_state, self.weights, self.about = engine, algorithm_state, weights, about
        self.parts: dict[str, object] = {}
        """The objects that DeepSpeed would write on this rank, by file name; empty with an offload to a disk."""
        if not engine.settings.deepspeed.offload.on_disk:
            engine.engine.checkpoint_engine.save = self._take
            engine.engine.save_checkpoint(
                TAG,
                tag=TAG,
                client_state={"step": engine.step_count},
                save_latest=False,
                exclude_frozen_parameters=engine.settings.lora is not None,
            )

    def _take(self, state_dict: object, path: str) -> None:
        self.parts[Path(path).name] = state_dict

    def write(self, target: Path, lag: int = 0) -> None:
        """Replaces the state in `target`, all at once, and removes the states of earlier rounds beside it.

        Every rank takes part.

        Args:
            target: folder of the state.
            lag: age in rounds of the oldest policy that may be lost with a node's own disk.
        """
        rank = self.engine.rank
        temporary = self.engine.from_first(files.temporary_path(target) if rank.first else target)
        try:
            with naming(target), translate_write_errors(target.parent):
                digests = ranks.gathered(self._write_parts(temporary / TAG))
                if rank.first:
                    known = {f"{TAG}/{name}": digest for part in digests for name, digest in part.items()}
                    known |= self._link_policy(temporary / POLICY)
                    files.write_json(temporary / ALGORITHM_STATE, self.algorithm_state)
                    world, zero_stage = rank.world, self.engine.zero_stage
                    manifest.write_manifest(temporary, known, world=world, zero_stage=zero_stage, **self.about)
                    files.replace_folder(temporary, target)
                    _remove_others(target, lag)
        finally:
            if rank.first:
                shutil.rmtree(temporary, ignore_errors=True)
        self.engine.barrier()

    def _write_parts(self, folder: Path) -> dict[str, str]:
        """Writes this rank's files; returns their digests."""
        folder.mkdir(parents=True, exist_ok=True)
        engine = self.engine
        if engine.settings.deepspeed.offload.on_disk:
            return nvme.save_state(engine.engine, folder, engine.step_count)
        return {
            name: deepspeed_config.save_reproducibly(engine.host_copies.of(part), folder / name)
            for name, part in self.parts.items()
        }

    def _link_policy(self, folder: Path) -> dict[str, str]:
        """Links the files of the policy, or copies them if the file system has no hard links."""
        if self.weights is None:
            return {}
        for file in manifest.folder_files(self.weights):
            link = folder / file.relative_to(self.weights)
            link.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file.resolve(), link)  # the original may be on a node's own disk (exchange)
            except OSError:
                shutil.copyfile(file, link)
        return {f"{POLICY}/{name}": digest for name, digest in manifest.read_manifest(self.weights).digests.items()}


def _remove_others(target: Path, lag: int) -> None:
    """Removes other states beside `target`, and leftovers of interrupted writes. Keeps those from which policies up to
    `lag` rounds older can be recreated.
    """
    for folder in of_rounds(target.parent):
        if folder.name > target.name:
            shutil.rmtree(folder, ignore_errors=True)
    remove_older(target, lag)
    files.remove_temporary(target.parent, "*")


def remove_older(target: Path, lag: int) -> None:
    """Removes the states beside `target` that are older, except those that `_remove_others` keeps."""
    enough = [folder for folder in of_rounds(target.parent) if int(folder.name) <= int(target.name) - lag]
    for folder in enough[1:]:
        shutil.rmtree(folder, ignore_errors=True)


def of_rounds(folder: Path) -> list[Path]:
    """The states in a folder, the newest first."""
    return sorted(folder.glob("[0-9]" * 5), reverse=True)


def verify(source: Path, settings: TrainerSettings, **about: object) -> None:
    """Checks a saved state before an engine is made for it; each rank reads some of the files.

    Args:
        source: folder of the state.
        settings: settings of the engine.
        about: facts that the state was saved with.

    Raises:
        UserError: a file was changed, the manifest differs, or the number of ranks or the ZeRO stage has changed.
    """
    stage = deepspeed_config.effective_zero_stage(settings.dtype, settings.deepspeed.zero_stage)
    expected = {"world": ranks.current().world, "zero_stage": stage, **about}
    saved = manifest.verify_manifest(source).about
    for key, value in expected.items():
        if saved.get(key) != value:
            raise UserError(
                f"{source}: trainer state with {KEYS.get(key, key)} {saved.get(key)}, but this run has {value}; "
                "keep the old setting or start a new run"
            )


def load(engine: Engine, source: Path) -> JSON:
    """Loads a state into an engine that was made from the policy saved with it, after `verify`.

    Returns:
        The algorithm state.

    Raises:
        UserError: a file holds something other than a state.
    """
    if engine.settings.deepspeed.offload.on_disk:
        engine.step_count = nvme.load_state(engine.engine, source / TAG)
    else:
        strict = engine.settings.weights_in_state and engine.settings.lora is None
        _, client_state = engine.engine.load_checkpoint(str(source), tag=TAG, load_module_strict=strict)
        engine.step_count = int(client_state["step"])
    return files.read_artifact(source / ALGORITHM_STATE, f"delete {source} and run again")
