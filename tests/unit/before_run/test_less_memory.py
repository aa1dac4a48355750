"""Bytes a weight of optimizers and 4-bit weights, worked out by hand."""

from typing import get_args

import pytest
from helpers import mini

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run import memory
from rloo_pipeline.before_run.memory import MicroBatch, RunMemory
from rloo_pipeline.config import Config, OptimizerName

LAYERS = 10 * (2 * 1000 * (1000 + 500) + 3 * 1000 * 3000)
SHAPE = ModelDims(1000, 10, 1000, 500, 3000, 50_000, LAYERS + 50_000_000)
"""120 million weights in matrices of layers, 50 million in the embedding."""
NOTHING = MicroBatch(0, 0, several=True)


def update(**changes) -> memory.Terms:
    return RunMemory(Config(**mini(model={"dtype": "bfloat16"}, **changes)), SHAPE, "cuda").update(NOTHING)


def test_the_memory_of_each_optimizer_is_known() -> None:
    assert memory.OPTIMIZER_STATE.keys() == memory.STEP_SCRATCH.keys() == {*get_args(OptimizerName)}


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("adamw", 8 * 170e6),
        ("adamw_8bit", (2 + 8 / 256) * 170e6),
        ("adafactor", 0),
        ("muon", 4 * 120e6 + 8 * 50e6),
    ],
)
def test_an_optimizer_has_its_state_besides_a_float32_copy_and_sum(name, moments) -> None:
    assert LAYERS == 120e6
    assert update(update={"optimizer": name})["optimizer"] == pytest.approx(moments + 8 * 170e6)


def test_what_is_offloaded_is_in_the_memory_of_the_node_and_not_on_the_gpu() -> None:
    def predicted(**deepspeed) -> tuple[memory.Terms, memory.Terms]:
        config = Config(**mini(model={"dtype": "bfloat16"}, deepspeed={"processes": 2, **deepspeed}))
        return RunMemory(config, SHAPE, "cuda").update(NOTHING), RunMemory(config, SHAPE).offloaded()

    assert predicted(zero_stage=3)[1] == {}
    state, half = {"optimizer": "cpu"}, 170e6 / 2
    gpu, host = predicted(zero_stage=2, offload=state)
    assert (gpu["weights"], gpu["optimizer"]) == (2 * 170e6, 4 * half), "sums of gradients stay until the step"
    assert host == {"optimizer": 12 * half, "gradients": 4 * half}
    gpu, host = predicted(zero_stage=3, offload=state)
    assert (gpu["weights"], gpu["optimizer"]) == (2 * half, 0)
    assert host == {"optimizer": 12 * half, "gradients": 8 * half}
    gpu, host = predicted(zero_stage=3, offload={**state, "parameters": "cpu"})
    assert gpu["weights"] == 2 * 170e6, "all of them, as they are fewer than DeepSpeed gathers at once"
    assert host["weights"] == 2 * half


def test_what_is_on_disk_leaves_buffers_in_the_memory_of_the_node() -> None:
    deepspeed = {"processes": 2, "zero_stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme"}}
    config = Config(**mini(model={"dtype": "bfloat16"}, deepspeed=deepspeed))
    half, embedding = 170e6 / 2, 50e6 / 2
    gpu = RunMemory(config, SHAPE, "cuda").update(NOTHING)
    assert gpu["optimizer"] == 0
    forward = gpu["activations"] + gpu["logits"]
    assert gpu["gradients beyond these"] == pytest.approx((2 + 4) * half - forward), (
        "and their float32 form, at the step"
    )
    host = RunMemory(config, SHAPE).offloaded()
    assert host == {"buffers": 16 * half + 5 * 2 * (embedding + 2**20), "gradients": 4 * half}
    assert RunMemory(config, SHAPE).on_disk() == {"optimizer": 16 * half, "parameters": 2 * half}


def test_nf4_has_four_bits_and_a_scale_per_block_for_the_layers_alone() -> None:
    terms = update(update={"lora": {}})
    assert terms["weights"] == 2 * 170e6
    changes = {"update": {"lora": {}}, "warmstart": {"sft": None}}
    config = Config(**mini(model={"dtype": "bfloat16", "quantization": "nf4"}, **changes))
    terms = RunMemory(config, SHAPE, "cuda").update(NOTHING)
    assert terms["weights"] == pytest.approx((0.5 + 4 / 64) * 120e6 + 2 * 50e6)


def test_log_probs_of_a_split_model_hold_its_share() -> None:
    config = Config(**mini(model={"dtype": "bfloat16"}, deepspeed={"zero_stage": 3, "processes": 4}))
    assert RunMemory(config, SHAPE, "cuda").reference()["weights"] == 2 * 170e6 / 4
