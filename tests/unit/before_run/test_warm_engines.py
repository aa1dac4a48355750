"""Which engines stay warm on GPUs, by what they take of the machine's memory while they wait."""

import json
from unittest import mock

import huggingface_hub
import numpy as np
import pytest
from helpers import mini, printed
from safetensors.numpy import save_file

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run import memory, warm_engines
from rloo_pipeline.before_run.memory import RunMemory
from rloo_pipeline.commands import plan
from rloo_pipeline.config import REWARD_MODEL, Config
from rloo_pipeline.runtime import devices
from rloo_pipeline.stages.table import ROWS

ONE_EACH = dict.fromkeys(("sampler", "logprobs", "trainer", "scorer"), 1)
QWEN_7B = ModelDims(3584, 28, 3584, 512, 18944, 152064, 7_600_000_000)


@pytest.mark.parametrize(
    ("gigabytes", "left_out"),
    [
        (256, set()),
        (170, {"logprobs"}),
        (128, {"trainer"}),
        (40, {"trainer", "logprobs"}),
        (16, {"trainer", "logprobs", "sampler"}),
    ],
)
def test_engines_that_the_memory_of_the_machine_does_not_hold_start_in_each_round(gigabytes, left_out) -> None:
    config = Config(**mini(model={"dtype": "bfloat16"}))
    assert warm_engines._too_many(config, QWEN_7B, QWEN_7B, ONE_EACH, gigabytes * 1e9) == left_out


def test_each_worker_of_a_role_waits_with_an_engine() -> None:
    config = Config(**mini(model={"dtype": "bfloat16"}))
    room = sum(warm_engines.waiting_bytes(config, QWEN_7B, QWEN_7B).values()) / warm_engines.SHARE + 1
    for counts, left_out in ((ONE_EACH, set()), (ONE_EACH | {"sampler": 2}, {"logprobs"})):
        assert warm_engines._too_many(config, QWEN_7B, QWEN_7B, counts, room) == left_out
    only_samplers = {"sampler": 3}
    assert not warm_engines._too_many(config, QWEN_7B, QWEN_7B, only_samplers, room)


def test_each_rank_of_a_trainer_waits_with_a_copy_of_the_weights() -> None:
    def trainer(**deepspeed) -> float:
        config = Config(**mini(model={"dtype": "bfloat16"}, deepspeed=deepspeed))
        return warm_engines.waiting_bytes(config, QWEN_7B, QWEN_7B).get("trainer", 0)

    assert trainer(processes=4, zero_stage=2) - trainer() == 3 * (warm_engines.PROCESS + 2 * QWEN_7B.parameters)
    assert not trainer(processes=4, zero_stage=3), "which is not kept"


def test_a_reward_model_waits_too(tmp_path, monkeypatch) -> None:
    """One that the run trains from its model, or that is not on this machine yet, is as large as the model."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    save_file({"score": np.zeros(500, "float32")}, tmp_path / "model.safetensors")
    cache = {"some/other": str(tmp_path / "config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, *_, **__: cache.get(name))
    scored = [
        {"function": REWARD_MODEL, "name": name, "options": options, "gpus": 1}
        for name, options in (
            ("own", {}),
            ("other", {"model": "some/other"}),
            ("missing", {"model": "some/missing", "dtype": "float32"}),
        )
    ]
    pairs = {"train": {"path": "pairs.jsonl"}}
    config = Config(**mini(model={"dtype": "bfloat16"}, rewards=scored, reward_model=pairs))
    size = warm_engines.waiting_bytes(config, QWEN_7B, QWEN_7B)["scorer"]
    assert size == 3 * warm_engines.PROCESS + 2 * QWEN_7B.parameters + 1000 + 4 * QWEN_7B.parameters
    too_many = warm_engines._too_many(config, QWEN_7B, QWEN_7B, ONE_EACH, 220e9)
    assert too_many == {"scorer"}, "it starts in less time than the trainer"
    assert "scorer" not in warm_engines.waiting_bytes(Config(**mini()), QWEN_7B, QWEN_7B)


@pytest.mark.parametrize(
    "stage",
    [row.stage for row in ROWS if row.decides is not None and {row.worker, row.engine} & {"logprobs", "trainer"}],
)
def test_a_stage_that_computes_beside_a_reward_model_leaves_it_room(stage) -> None:
    """With the sections that the stage gets."""
    model = {"function": REWARD_MODEL, "gpus": 1, "options": {"model": "x"}}
    without, beside = (Config(**mini(**changes)).only(stage) for changes in ({}, {"rewards": [model]}))
    room = [RunMemory(config, QWEN_7B)._process for config in (without, beside)]
    assert room[1] - room[0] == devices.IDLE["scorer"]


def test_plan_counts_the_processes_of_reward_models_on_cpus(tmp_path) -> None:
    """All of them, also those that only a batch of rows needs."""
    reward = {"function": REWARD_MODEL, "options": {"model": "is/not/here"}, "threads": 2}
    config = Config(**mini(rewards=[reward], scoring={"workers": 6}))
    terms = memory.reward_models(config, QWEN_7B, "cpu")
    assert terms == {"processes": 3 * 300e6, "weights of reward_model": 3.0 * 4 * QWEN_7B.parameters}
    assert memory.reward_models(config, QWEN_7B, "cuda") == {}
    for shards, of_each in ((1, ""), (2, ", each of up to 2 workers")):
        config = config.override({"rollout.shards": shards})
        assert f"on CPUs, also between their stages{of_each}:" in printed(plan.plan_run, config, None)


def test_auto_looks_at_the_model_and_always_does_not(tmp_path, monkeypatch) -> None:
    sizes = {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80, "vocab_size": 150_000}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "llama", "intermediate_size": 28_672}))
    large = {"model": {"build": None, "build_options": {}, "name_or_path": str(tmp_path)}}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices, "machine_bytes", lambda: 128e9)
    assert "trainer" in warm_engines.left_out(Config(**mini(**large)), ONE_EACH)
    assert not warm_engines.left_out(Config(**mini(workers="always", **large)), ONE_EACH)
    assert not warm_engines.left_out(Config(**mini()), ONE_EACH), "built in the first stage"
    on_hub = Config(**mini(model={"build": None, "build_options": {}, "name_or_path": "some/model"}))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(tmp_path / "config.json"))
    assert "trainer" in warm_engines.left_out(on_hub, ONE_EACH), "before the first stage fetches the weights"
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    assert not warm_engines.left_out(Config(**mini(**large)), ONE_EACH), "as before"


def test_a_reward_model_from_another_base_is_as_large_as_that(tmp_path, monkeypatch) -> None:
    """A small one beside a large model, whose size decides what the machine holds."""
    folders = {}
    for name, layers in (("policy", 32), ("small", 1)):
        sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": layers, "vocab_size": 1000}
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "config.json").write_text(json.dumps(sizes | {"model_type": "llama", "intermediate_size": 8}))
    seen = []
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices, "machine_bytes", lambda: 1e12)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", mock.Mock(side_effect=OSError))
    monkeypatch.setattr(warm_engines, "_too_many", lambda _, dims, own, *__: seen.append(dims.layers / own.layers))
    model = {"build": None, "build_options": {}, "name_or_path": str(folders["policy"])}
    for base in ({}, {"name_or_path": str(folders["small"])}, {"name_or_path": "not/fetched"}):
        section = {"train": {"path": "pairs.jsonl"}, **base}
        scored = [{"function": REWARD_MODEL, "gpus": 1}]
        warm_engines.left_out(Config(**mini(model=model, rewards=scored, reward_model=section)), ONE_EACH)
    assert seen == [1, 32, 1], "as large as the run's model if its own base is not here"
