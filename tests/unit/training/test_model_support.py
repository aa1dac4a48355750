"""A model that packed training does not cover is an error, decided from its config.json."""

import json
import re
import subprocess
import sys

import pytest
from helpers import mini

from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import groups
from rloo_pipeline.stages.probe import probe
from rloo_pipeline.stages.stage_assets import stage_assets
from rloo_pipeline.stages.warmstart import warmstart
from rloo_pipeline.training.model_support import check_model, length_limit

LAYERS = {"num_hidden_layers": 4}
HALF = {"layer_types": ["sliding_attention", "full_attention"] * 2}
WINDOWED = {
    "mistral": {"model_type": "mistral", "sliding_window": 64},
    "mistral by its default": {"model_type": "mistral"},
    "mixtral": {"model_type": "mixtral", "sliding_window": 64},
    "phi3": {"model_type": "phi3", "sliding_window": 64},
    "phi3 whatever its layer_types": {
        "model_type": "phi3",
        "sliding_window": 64,
        "layer_types": ["full_attention"] * 4,
    },
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 64},
    "ministral3": {"model_type": "ministral3", "sliding_window": 64},
    "qwen2 with windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, **LAYERS},
    "qwen2 from layer 2 on": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 2,
        **LAYERS,
    },
    "olmo3": {"model_type": "olmo3", "sliding_window": 64, **HALF},
    "llama4": {"model_type": "llama4_text", "attention_chunk_size": 64, "layer_types": ["chunked_attention"]},
    "gemma3 with vision": {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "sliding_window": 64}},
    "unknown": {"model_type": "somebody's", "local_window_size": 64},
    "phi3 with long rotary": {
        "model_type": "phi3",
        "original_max_position_embeddings": 64,
        "sliding_window": None,
        "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
    },
    "llama with dynamic rotary": {
        "model_type": "llama",
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
    },
}
FULL = {
    "llama": {"model_type": "llama"},
    "mistral without": {"model_type": "mistral", "sliding_window": None},
    "qwen3 as it is published": {
        "model_type": "qwen3",
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        **LAYERS,
    },
    "qwen2 with its window switched off": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64},
    "qwen2 from beyond its layers on": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 4,
        **LAYERS,
    },
    "olmo3 without": {"model_type": "olmo3", "sliding_window": 64, "layer_types": ["full_attention"] * 4},
    "yarn": {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}
OUTSIDE = {
    "soft-capped attention": {"model_type": "gemma2"},
    "attention sinks": {"model_type": "gpt_oss"},
    "recurrent": {"model_type": "falcon_h1"},
    "linear_attention": {"model_type": "somebody's", "layer_types": ["linear_attention", "full_attention"]},
    "in its own code": {"model_type": "bloom"},
    "quantized": {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
    "causally": {"model_type": "embedder", "is_causal": False},
}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_limits_the_length_of_sequences(name) -> None:
    config = WINDOWED[name]
    limit = length_limit(config)
    assert limit is not None
    check_model(config, limit.tokens)
    check_model(config)
    with pytest.raises(UserError, match=f"together may have {limit.tokens + 1} tokens") as caught:
        check_model(config, limit.tokens + 1)
    assert limit.cause in str(caught.value)
    assert config["model_type"] in str(caught.value)
    assert limit.tokens == (4096 if "default" in name else 64)


@pytest.mark.parametrize("name", FULL)
def test_full_causal_attention_has_no_length_limit(name) -> None:
    assert length_limit(FULL[name]) is None
    check_model(FULL[name], 10**6)


@pytest.mark.parametrize("why", OUTSIDE)
def test_anything_but_full_causal_attention_is_an_error(why) -> None:
    with pytest.raises(UserError, match=re.escape(why)) as caught:
        check_model(OUTSIDE[why])
    assert OUTSIDE[why]["model_type"] in str(caught.value)


def test_a_file_or_its_folder_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        check_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(OUTSIDE["in its own code"]))
    for place in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'config.json'}: bloom")):
            check_model(place)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Config:
    """Of a model that recurs; engines must not start."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(OUTSIDE["recurrent"]))
    (tmp_path / "assets").mkdir()
    assets = {"model": {"path": str(tmp_path / "model"), "revision": None}}
    (tmp_path / "assets" / "assets.json").write_text(json.dumps(assets))
    monkeypatch.setattr(groups, "load_sampler", lambda *_: pytest.fail("an engine starts"))
    return Config(**mini(model={"build": None, "build_options": {}, "name_or_path": str(tmp_path / "model")}))


def test_every_stage_before_the_first_engine_refuses(run, tmp_path) -> None:
    assets, out = tmp_path / "assets", tmp_path / "out"
    stages = {
        "stage-assets": lambda: stage_assets(run.only("stage-assets"), out),
        "warmstart": lambda: warmstart(run.only("warmstart"), assets, tmp_path, None, out),
        "probe": lambda: probe(run.only("probe"), tmp_path, assets, None, out),
    }
    (tmp_path / "model" / "model.safetensors").touch()
    for name, stage in stages.items():
        with pytest.raises(UserError, match="falcon_h1 mixes tokens in recurrent"):
            stage()
        assert not out.exists(), name


def test_no_torch_is_needed() -> None:
    code = "import sys, rloo_pipeline.training.model_support; assert not {'torch', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
