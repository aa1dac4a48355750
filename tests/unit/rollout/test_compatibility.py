"""One engine can hold policies whose configurations differ only in keys that it ignores."""

import json

import pytest

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.artifacts.model_files import ADAPTER
from rloo_pipeline.artifacts.policy import Policy


def with_config(model, folder, drop=(), **changes):
    """A folder with the model's config.json, with some keys changed and some dropped."""
    folder.mkdir()
    config = {key: value for key, value in read_json(model / "config.json").items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_equivalent_configurations_have_the_same_key(tiny_model, tmp_path) -> None:
    """The configuration of the same model from another version, in another dtype, or without defaults."""
    other = with_config(
        *(tiny_model, tmp_path / "other", ("attention_bias", "hidden_act")),
        dtype="bfloat16",
        transformers_version="4.0.0",
        _name_or_path="somewhere",
    )
    assert (other / "config.json").read_text() != (tiny_model / "config.json").read_text()
    assert Policy(other).engine_key == Policy(tiny_model).engine_key


@pytest.mark.parametrize("changes", [{"head_dim": 16}, {"rms_norm_eps": 1e-5}, {"tie_word_embeddings": False}])
def test_keys_that_change_the_computation_change_the_key(tiny_model, tmp_path, changes) -> None:
    other = with_config(tiny_model, tmp_path / "other", **changes)
    assert Policy(other).engine_key != Policy(tiny_model).engine_key


def test_the_key_of_an_adapter_ignores_the_order_of_modules_but_not_the_rank(tiny_model, tmp_path) -> None:
    def adapter(name, **changes):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"base_model_name_or_path": str(tiny_model), "r": 4, "target_modules": ["q_proj", "v_proj"]}
        (folder / ADAPTER).write_text(json.dumps(settings | changes))
        return Policy(folder).engine_key

    assert adapter("first") == adapter("second", target_modules=["v_proj", "q_proj"]) != adapter("third", r=8)
