"""Trainers with their state on a disk, and others (`torchrun nvme_ranks.py FOLDER` or, on one rank, `compare`)."""

import sys
from pathlib import Path

import torch
from split_ranks import step
from trainers import trainer_settings

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Offload
from rloo_pipeline.training import trainer_state
from rloo_pipeline.training.engine import Engine

SUB_GROUP = 1_500_000
"""Numbers of a sub-group, so that there are several."""
MICRO_BATCH = 48
"""Tokens of a micro-batch: a step has four, two on each of two ranks."""


def build(folder: Path, dtype: str, offload: Offload, disk: Path) -> Engine:
    from deepspeed import zero

    zero.Init.param_id = 0  # counts the weights of a process, as of one engine
    keys = {"zero_optimization": {"sub_group_size": SUB_GROUP}}
    where = {"offload": offload, "nvme_path": str(disk), "config": keys}
    return Engine(Policy(folder), trainer_settings(1e-3, dtype=dtype, zero_stage=3, **where), 0)


def digests_after(engine: Engine, steps: int, folder: Path) -> tuple[str, str]:
    """Digests of policy and state after optimizer steps; both are written to the folder."""
    for _ in range(steps):
        step(engine, MICRO_BATCH)
    engine.save_policy(folder / "policy")
    trainer_state.TrainerState(engine, {}).write(folder / "state")
    return tuple(manifest.digest(folder / kind / manifest.MANIFEST) for kind in ("policy", "state"))


def count_steps_as_deepspeed(state: Path) -> None:
    """Makes the steps of a state an int, as in those that DeepSpeed's AdamW has left."""
    for file in (state / trainer_state.TAG).iterdir():
        values = torch.load(file)
        values["moments"]["step"] = int(values["moments"]["step"])
        torch.save(values, file)


def compare(folder: Path, dtype: str, parameters: str | None) -> None:
    """Checks that a trainer on disk, a resumed one and one in memory write the same bytes.

    Args:
        folder: it has the folders `model` and `disk`.
        dtype: number format of the weights.
        parameters: where the weights are.
    """
    model, disk = folder / "model", folder / "disk"
    on_disk = Offload(optimizer="nvme", parameters=parameters)
    engine = build(model, dtype, on_disk, disk)
    after_2, _ = digests_after(engine, 2, folder / "2")
    tensors = {file.name.rpartition("_")[2] == "param.tensor.swp" for file in disk.rglob("*.swp")}
    assert tensors == ({True, False} if parameters == "nvme" else {False})
    if parameters is None:
        count_steps_as_deepspeed(folder / "2" / "state")
    resumed = build(folder / "2" / "policy", dtype, on_disk, disk)
    assert trainer_state.load(resumed, folder / "2" / "state") == {}
    assert resumed.step_count == 2
    after_3 = digests_after(engine, 1, folder / "3")  # the first step for which β² · β is not β³ in float32
    assert digests_after(resumed, 1, folder / "resumed") == after_3
    memory = build(model, dtype, Offload(optimizer="cpu", parameters=parameters and "cpu"), disk)
    assert digests_after(memory, 2, folder / "2 in memory")[0] == after_2
    assert digests_after(memory, 1, folder / "3 in memory")[0] == after_3[0]


if __name__ == "__main__":
    compare(Path(sys.argv[1]), "bfloat16", "nvme")
