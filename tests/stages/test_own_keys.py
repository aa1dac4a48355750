"""DeepSpeed's own keys are merged, or refused by name."""

import json

import pytest
from helpers import mini
from test_optimizers import ALL, settings

from rloo_pipeline.config import Config
from rloo_pipeline.config.training import DECIDED_BY
from rloo_pipeline.training.deepspeed_internals import deepspeed_config


def test_a_file_that_cannot_be_read_gives_a_one_line_error() -> None:
    with pytest.raises(ValueError, match=r"no-such\.json: no JSON file that can be read"):
        Config(**mini(deepspeed={"config": "no-such.json"}))


@pytest.mark.parametrize("content", ['"{}"', "null", "[1]"])
def test_a_file_without_keys_is_not_ignored(content, tmp_path) -> None:
    (tmp_path / "ds.json").write_text(content)
    with pytest.raises(ValueError, match=r"ds\.json: holds no JSON object"):
        Config(**mini(deepspeed={"config": str(tmp_path / "ds.json")}))


def test_own_keys_are_merged_and_count_for_reruns(tmp_path) -> None:
    file = tmp_path / "ds.json"
    contents = {"zero_optimization": {"stage": "auto", "reduce_bucket_size": 7}, "wall_clock_breakdown": True}
    file.write_text(json.dumps(contents | {"train_batch_size": "auto"}))
    config = Config(**mini(deepspeed={"config": str(file)}))
    section = config.deepspeed.model_copy(update={"zero_stage": 2})
    merged = deepspeed_config.configuration(settings("adamw", "bfloat16", 2)._replace(deepspeed=section))
    assert merged["zero_optimization"]["reduce_bucket_size"] == 7
    assert merged["zero_optimization"]["stage"] == 2
    assert merged["wall_clock_breakdown"] is True
    assert "train_batch_size" not in merged
    file.write_text(json.dumps({"wall_clock_breakdown": False}))
    assert Config(**mini(deepspeed={"config": str(file)})).params("update") != config.params("update")


def test_every_key_that_is_set_here_is_refused_there() -> None:
    from rloo_pipeline.config.section import flatten, nest

    our_keys = flatten(deepspeed_config.configuration(settings("adamw", "bfloat16", 3, ALL)))
    free = {"zero_optimization.reduce_bucket_size", "steps_per_print"}
    for key in {*our_keys, *DECIDED_BY} - free:
        with pytest.raises(ValueError, match="cannot be set there; it follows from"):
            Config(**mini(deepspeed={"config": nest({key: 1})}))


def test_the_weights_of_a_state_are_those_that_were_saved() -> None:
    """DeepSpeed would take rounded ones, and a run that was interrupted would go on with others."""
    with pytest.raises(ValueError, match=r"load_from_fp32_weights cannot be set there"):
        Config(**mini(deepspeed={"config": {"zero_optimization": {"load_from_fp32_weights": False}}}))
