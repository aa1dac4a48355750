"""Trainer state on disk: DeepSpeed's checkpoint, the algorithm's state, and a manifest."""

from __future__ import annotations

import shutil
from pathlib import Path

from rloo_pipeline.artifacts import files, manifest
from rloo_pipeline.config import JSON
from rloo_pipeline.errors import UserError, translate_disk_full
from rloo_pipeline.training import nvme
from rloo_pipeline.training.engine import Engine

TAG = "state"
ALGORITHM_STATE = "carried.json"
KEYS = {
    "world": "deepspeed.processes",
    "zero_stage": "deepspeed.zero_stage (where 0 counts as 1 in 16-bit formats)",
}
"""Keys of the configuration for facts about a state that come from it."""


def save(engine: Engine, target: Path, algorithm_state: JSON, **about: object) -> None:
    """Writes optimizer, master weights and algorithm state; every rank takes part. The policy holds the weights.

    Args:
        engine: the engine to save.
        target: folder to write, replaced as a whole.
        algorithm_state: `AlgorithmState.to_json()`.
        about: facts that `load` must be called with again, such as the round.
    """
    import torch

    path = [str(files.temporary_path(target)) if engine.rank.first else ""]
    torch.distributed.broadcast_object_list(path, src=0)
    temporary = Path(path[0])
    try:
        with translate_disk_full(target.parent):
            if engine.settings.offload.on_disk:
                (temporary / TAG).mkdir(parents=True, exist_ok=True)
                nvme.save_state(engine.engine, temporary / TAG, engine.step_count)
            else:
                engine.engine.save_checkpoint(
                    path[0],
                    tag=TAG,
                    client_state={"step": engine.step_count},
                    save_latest=False,
                    exclude_frozen_parameters=engine.settings.lora is not None,
                )
            engine.barrier()
            if engine.rank.first:
                files.write_json(temporary / ALGORITHM_STATE, algorithm_state)
                manifest.write_manifest(temporary, world=engine.rank.world, zero_stage=engine.zero_stage, **about)
                files.replace_folder(temporary, target)
    finally:
        if engine.rank.first:
            shutil.rmtree(temporary, ignore_errors=True)
    engine.barrier()


def load(engine: Engine, source: Path, **about: object) -> JSON:
    """Loads a saved state into an engine that was built from the policy saved with it.

    Args:
        engine: the engine to fill.
        source: folder of the state.
        about: facts that the state was saved with.

    Returns:
        The algorithm state.

    Raises:
        UserError: a file was changed, the manifest differs, or the number of ranks or the ZeRO stage has changed.
    """
    expected = {"world": engine.rank.world, "zero_stage": engine.zero_stage, **about}
    saved = manifest.verify_manifest(source).about
    for key, value in expected.items():
        if saved.get(key) != value:
            raise UserError(
                f"{source}: trainer state with {KEYS.get(key, key)} {saved.get(key)}, this run has {value}; "
                "keep the old setting or start a new run"
            )
    if engine.settings.offload.on_disk:
        engine.step_count = nvme.load_state(engine.engine, source / TAG)
    else:
        strict = engine.weights_in_state and engine.settings.lora is None
        _, client_state = engine.engine.load_checkpoint(str(source), tag=TAG, load_module_strict=strict)
        engine.step_count = int(client_state["step"])
    return algorithm_state(source)


def algorithm_state(source: Path) -> JSON:
    """The algorithm state in the folder of a saved trainer state."""
    return files.read_artifact(source / ALGORITHM_STATE, f"delete {source} and run again")
