"""A model that packed training does not cover is an error, decided from its config.json."""

import json
import re
import subprocess
import sys
from contextlib import ExitStack, nullcontext

import pytest
from helpers import mini, staged

from rloo_pipeline.artifacts.model_dims import length_limit
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import model_inputs, model_trial
from rloo_pipeline.before_run.findings import RunInputs
from rloo_pipeline.config import Config, ModelSource
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import groups
from rloo_pipeline.stages.probe import probe
from rloo_pipeline.stages.stage_assets import stage_assets
from rloo_pipeline.stages.warmstart import warmstart
from rloo_pipeline.training.model_support import MINISTRAL_ROPE, check_model, check_run

LONG_ROTARY = {
    "phi3 with long rotary": {
        "model_type": "phi3",
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
    },
    "llama with dynamic rotary": {
        "model_type": "llama",
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
    },
    "within a model with vision": {
        "model_type": "somebody's",
        "text_config": {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    },
}
UNLIMITED = {
    "llama": {"model_type": "llama"},
    "a window": {"model_type": "mistral", "sliding_window": 64},
    "yarn": {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}
REFUSED = {
    "encoder": {"model_type": "bert"},
    "quantized": {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
    "causally": {"model_type": "embedder", "is_causal": False},
}


@pytest.mark.parametrize("name", LONG_ROTARY)
def test_a_rotary_embedding_that_changes_limits_the_length_of_sequences(name) -> None:
    config = LONG_ROTARY[name]
    limit = length_limit(config)
    assert limit is not None
    assert limit.tokens == 64
    check_model(config, 64)
    check_model(config)
    with pytest.raises(UserError, match="a prompt and its completion may have 65 tokens") as caught:
        check_model(config, 65)
    assert limit.cause in str(caught.value)
    assert config["model_type"] in str(caught.value)


@pytest.mark.parametrize("name", UNLIMITED)
def test_no_other_model_has_a_limit(name) -> None:
    assert length_limit(UNLIMITED[name]) is None
    check_model(UNLIMITED[name], 10**6)


def ministral(first: int) -> dict:
    """A model whose attention is scaled from this token on; vLLM does not read that of a transformers configuration."""
    rope = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": first}
    return {"model_type": "ministral3", "rope_parameters": rope}


def longrope(**keys: float) -> dict:
    """A rotary embedding for contexts 16 times as long as those of the first training, which scales by sqrt(1.5)."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 256, **keys}
    return {"model_type": "phi3", "max_position_embeddings": 4096, "rope_parameters": rope}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (longrope(), None),
        (longrope(factor=16.0), None),
        (longrope(attention_factor=1.5**0.5), None),
        (longrope(attention_factor=1.0, short_mscale=1.0), None),
        (longrope(factor=1.0), "attention by 1 .* by 1.225 in vLLM .* add short_mscale: 1.0 and long_mscale: 1.0 to"),
        (longrope(attention_factor=2.0, factor=16.0), "attention by 2 .* by 1.225 in vLLM"),
        (longrope(short_mscale=1.0), "attention by 1.225 .* by 1 in vLLM"),
        ({**longrope(short_mscale=1.0), "model_type": "phimoe"}, None),
        (ministral(79), "from 79 tokens on, .* may have 80 tokens"),
        (ministral(80), None),
        ({"model_type": "ministral3", "rope_scaling": ministral(79)["rope_parameters"]}, "from 79 tokens on"),
        ({"model_type": "lfm2", "tie_embedding": False}, "tie_embedding is false, but .* lfm2 .* set tie_embedding: t"),
        ({"model_type": "lfm2", "tie_word_embeddings": False}, "tie_word_embeddings is .* set tie_word_embeddings: tr"),
        ({"model_type": "lfm2"}, None),
    ],
)
def test_what_vllm_computes_differently_is_an_error(tmp_path, config, message) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_run(Config(**mini()), Policy(tmp_path))


def test_a_ministral_without_a_rotary_embedding_has_that_of_transformers(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ministral3"}))
    policy = Policy(tmp_path)
    read = policy.transformers_config.rope_parameters
    assert {key: read[key] for key in MINISTRAL_ROPE} == MINISTRAL_ROPE
    dataset = {"max_prompt_length": read["original_max_position_embeddings"]}
    with pytest.raises(UserError, match="from 16384 tokens on"):
        check_run(Config(**mini(dataset=dataset)), policy)


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_trained_is_an_error(why) -> None:
    with pytest.raises(UserError, match=re.escape(why)) as caught:
        check_model(REFUSED[why])
    assert REFUSED[why]["model_type"] in str(caught.value)


def test_the_file_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        check_run(Config(**mini()), Policy(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(REFUSED["encoder"]))
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'config.json'}: bert")):
        check_run(Config(**mini()), Policy(tmp_path))


def test_an_adapter_beside_a_config_json_is_not_a_model(tmp_path) -> None:
    """An update would train the base alone, as if the adapter were not there."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    check_run(Config(**mini()), Policy(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_config\.json: this is an adapter on another model; merge it"):
        check_run(Config(**mini()), Policy(tmp_path))


def test_an_adapter_without_a_config_json_as_runs_write_it_has_to_be_merged(tmp_path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r": an adapter on another model; merge it into that model .* \(model\.name_or_path\)$"
    ):
        model_inputs.local_model(ModelSource(name_or_path=str(tmp_path)))


@pytest.fixture
def run(tmp_path, monkeypatch) -> Config:
    """Of an encoder; engines must not start."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(REFUSED["encoder"]))
    (tmp_path / "model" / "model.safetensors").touch()
    staged(tmp_path / "assets", tmp_path / "model")
    monkeypatch.setattr(groups, "load_sampler", lambda *_: pytest.fail("an engine starts"))
    return Config(**mini(model={"build": None, "build_options": {}, "name_or_path": str(tmp_path / "model")}))


def test_every_stage_before_the_first_engine_refuses(run, tmp_path) -> None:
    assets, out = tmp_path / "assets", tmp_path / "out"
    stages = {
        "stage-assets": lambda: stage_assets(run.only("stage-assets"), out),
        "warmstart": lambda: warmstart(run.only("warmstart"), assets, tmp_path, out),
        "probe": lambda: probe(run.only("probe"), tmp_path, Policy(tmp_path / "model"), out),
    }
    for name, stage in stages.items():
        with pytest.raises(UserError, match="bert is an encoder"):
            stage()
        assert not out.exists(), name


def test_a_refusal_of_a_model_that_is_built_names_its_function_and_no_temporary_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(**mini(rollout={"router_replay": True}))
    message = f"{config.model.build}: the model has no experts; set rollout.router_replay: false"
    for refused in (
        lambda: stage_assets(config.only("stage-assets"), tmp_path / "out"),
        lambda: model_inputs.shape(config),
    ):
        with pytest.raises(UserError) as error:
            refused()
        assert str(error.value) == message
    with ExitStack() as stack:
        (finding,) = model_trial.model(RunInputs(config, tmp_path, stack))
    assert finding.message == message


def test_no_engine_is_imported_for_that_nor_for_adapters() -> None:
    engines = {"torch", "vllm", "transformers", "deepspeed", "peft"}
    code = f"import sys, rloo_pipeline.training.model_support; assert not {engines} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True)
