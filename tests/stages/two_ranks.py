"""Optimizer steps in bfloat16 on two ranks (`torchrun two_ranks.py MODEL OUTPUT`) or, without torchrun, on one.

Writes policies to OUTPUT, by ZeRO stage and dtype of communication, each rank also OUTPUT/RANK.json: by the same names
the gradient norms, and the files of weights that the rank has written. In a case of `overlap`, sums in float32 are
taken beside the backward pass.
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

from split_ranks import step
from trainers import trainer_settings

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import checkpointing
from rloo_pipeline.config.loading import load
from rloo_pipeline.runtime import devices, ranks, scratch
from rloo_pipeline.training import weight_files
from rloo_pipeline.training.deepspeed_internals import deepspeed_config
from rloo_pipeline.training.engine import Engine

CONFIGURATION = Path(__file__).parents[2] / ".test" / "config" / "config.yaml"
STEPS = 2
CASES = [(1, "float32"), (2, "float32"), (3, "float32"), (1, "model"), (2, "overlap"), (3, "overlap")]


def steps(model: Path, zero_stage: int, communication: str, output: Path) -> tuple[list[float], list[str]]:
    """Two steps on rows that are one micro-batch each, so that ranks only divide them among themselves."""
    overlap = communication == "overlap"
    formats = {"dtype": "bfloat16", "communication_data_type": "float32" if overlap else communication}
    with mock.patch.object(deepspeed_config, "overlaps", return_value=overlap):
        engine = Engine(Policy(model), trainer_settings(1e-2, zero_stage=zero_stage, **formats), 0)
    assert engine.engine.zero_overlap_comm() == overlap
    norms = []
    for _ in range(STEPS):
        step(engine)
        norms.append(engine.grad_norm)
    own = mock.Mock(side_effect=weight_files._write)
    with mock.patch.object(weight_files, "_write", own), mock.patch.object(weight_files, "SHARD", 20_000):
        engine.save_policy(output / name(zero_stage, communication))
    return norms, [call.args[1].name for call in own.call_args_list]


def on_two_nodes(model: Path, output: Path) -> None:
    """The policy of these ranks as if each were alone on a node, whose own disk is OUTPUT/node RANK."""
    number = str(ranks.current().number)
    nodes = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", scratch.EXCHANGE: str(output / f"node {number}")}
    (output / f"node {number}").mkdir()
    engine = Engine(Policy(model), trainer_settings(1e-2, zero_stage=3), 0)
    with mock.patch.dict(os.environ, nodes), mock.patch.object(weight_files, "SHARD", 20_000):
        engine.save_policy(output / "policies" / "00001", on_nodes=True)


def name(zero_stage: int, communication: str) -> str:
    """The name of a case."""
    return f"{zero_stage}-{communication}"


def recomputes(model: Path) -> bool:
    """Resolves `gradient_checkpointing: auto` where one rank has room for everything and the other for nothing."""
    room = 1e15 if ranks.current().first else 0.0
    with mock.patch.object(devices, "training_bytes", return_value=room):
        return checkpointing.resolve(load(CONFIGURATION), Policy(model).dimensions).deepspeed.gradient_checkpointing


if __name__ == "__main__":
    model, output = map(Path, sys.argv[1:])
    results = {"recomputes": recomputes(model)} | {name(*case): steps(model, *case, output) for case in CASES}
    (output / f"{ranks.current().number}.json").write_text(json.dumps(results))
    on_two_nodes(model, output)
