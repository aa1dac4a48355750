"""A key that changes what a stage computes is among its parameters, and other keys are not."""

import pytest
from helpers import mini

from rloo_pipeline.config import Config

DECIDING = (
    {"processes": 2},
    {"zero_stage": 1},
    {"communication_data_type": "model"},
    {"zero_stage": 2, "offload": {"optimizer": "cpu"}},
    {"config": {"dump_state": True}},
)


def warmstart_params(sft: bool = True, **deepspeed: object) -> dict:
    changes = {} if sft else {"warmstart": {"sft": None}}
    return Config(**mini(deepspeed=deepspeed, **changes)).params("warmstart")


@pytest.mark.parametrize("deepspeed", DECIDING)
def test_policy_0_after_sft_depends_on_how_sft_was_trained(deepspeed) -> None:
    plain = warmstart_params()
    assert warmstart_params(**deepspeed) != plain
    assert warmstart_params(sft=False, **deepspeed) == warmstart_params(sft=False)
    assert warmstart_params(threads=3, gradient_checkpointing=True, max_tokens_per_micro_batch=64) == plain


def test_a_copy_with_other_keys_leaves_the_configuration_as_it_was() -> None:
    config = Config(**mini())
    changed = config.override({"rounds": 7, "deepspeed.processes": 4, "deepspeed.zero_stage": 2})
    assert (changed.rounds, changed.deepspeed.processes, changed.deepspeed.zero_stage) == (7, 4, 2)
    assert config == Config(**mini()) != changed
    assert config.override({}) == config
    with pytest.raises(AttributeError, match="proceses"):
        config.override({"deepspeed.proceses": 4})
