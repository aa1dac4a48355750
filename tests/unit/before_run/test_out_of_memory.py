"""What a user reads when an engine finds too little memory; the messages are those of torch and vLLM on an H200."""

import argparse
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers import executable, mini

from rloo_pipeline.artifacts.model_dims import ModelDims
from rloo_pipeline.before_run import checkpointing, out_of_memory
from rloo_pipeline.cli import stage_options
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout.engine_arguments import VisibleGpu
from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.devices import GpuProcess

H200 = VisibleGpu(139.8 * 2**30, "NVIDIA H200")
QWEN_7B = ModelDims(3584, 28, 3584, 512, 18944, 152064, 7_600_000_000)
OURS, OTHER = GpuProcess(os.getpid(), "this process", 0.8e9), GpuProcess(41, "process 41 (rloo rollout)", 121e9)
ERRORS = [
    type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 121.99 GiB. GPU 0 has"),
    ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing"),
    AssertionError("Error in memory profiling. Initial free memory 16.2 GiB, current free memory 137.4 GiB. This"),
    ValueError("Free memory on device cuda:0 (13.9/139.8 GiB) on startup is less than desired GPU memory utilization"),
]


def config(**changes) -> Config:
    return Config(**mini(model={"dtype": "bfloat16"}, **changes))


@pytest.mark.parametrize("error", ERRORS)
def test_a_stage_that_samples_is_told_of_the_keys_of_vllm(tmp_path, monkeypatch, error) -> None:
    def fails(*_: object) -> None:
        raise error

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(mini()))
    monkeypatch.setattr(out_of_memory, "_gpu", lambda: H200)
    monkeypatch.setattr(devices, "gpu_processes", lambda: [OTHER, OURS])
    monkeypatch.setattr(stage_options, "runs_here", lambda *_: True)
    monkeypatch.setattr(stage_options, "call", fails)
    arguments = argparse.Namespace(config=tmp_path / "config.yaml", output=tmp_path / "000.parquet")
    with pytest.raises(UserError) as raised:
        stage_options.stage("rollout", "").run(arguments)
    assert "vllm.gpu_memory_utilization: 0.14 (0.9 now)" in str(raised.value)
    assert "process 41 (rloo rollout) holds 121.0 GB, this process holds 0.8 GB" in str(raised.value)
    assert "deepspeed" not in str(raised.value)


def test_the_trainer_of_a_reward_model_is_told_nothing_of_the_policys_memory(tmp_path, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise ERRORS[0]

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(mini()))
    monkeypatch.setattr(out_of_memory, "_gpu", lambda: H200)
    monkeypatch.setattr(devices, "gpu_processes", lambda: [OURS])
    monkeypatch.setattr(stage_options, "runs_here", lambda *_: True)
    monkeypatch.setattr(stage_options, "call", fails)
    files = {"config": tmp_path / "config.yaml", "model": tmp_path / "model", "output": tmp_path / "checks.json"}
    with pytest.raises(UserError, match=r"150\.1 GB; now .*; lower deepspeed\.max_tokens_per_micro_batch"):
        stage_options.stage("reward-model", "").run(argparse.Namespace(**files, assets=tmp_path))


def test_a_trainer_is_told_what_it_wanted_and_what_would_fit() -> None:
    changes = {"deepspeed": {"gradient_checkpointing": False, "max_tokens_per_micro_batch": 200_000}}
    text = out_of_memory.sentence("trainer", config(**changes), QWEN_7B, H200, [OURS])
    assert text.startswith("out of memory: the GPU (NVIDIA H200) has 150.1 GB; the trainer wanted about ")
    assert "optimizer 121.6" in text
    assert "would fit with " in text
    assert "vllm" not in text
    small = QWEN_7B._replace(parameters=500_000_000, layers=4)
    long = {"rollout": {"generation_batch_size": 4096, "max_completion_length": 1024}}
    wanted = [
        out_of_memory.sentence("trainer", config(**long, deepspeed=keys), small, H200, [OURS])
        for keys in ({}, {"max_tokens_per_micro_batch": checkpointing.MOST}, {"max_tokens_per_micro_batch": 16384})
    ]
    assert wanted[0] == wanted[1] != wanted[2], "`auto` wanted more"
    assert "end the other processes, or " in out_of_memory.sentence("trainer", config(), QWEN_7B, H200, [OTHER, OURS])


def test_an_engine_in_a_process_of_its_own_is_not_another_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as engine:
        held = GpuProcess(engine.pid, "process 42 (VLLM::EngineCore)", 125e9)
        sentence = out_of_memory.sentence("sampler", config(), QWEN_7B, H200, [held, OURS])
        engine.kill()
    assert "process 42 (VLLM::EngineCore) holds 125.0 GB" in sentence
    assert "end the other" not in sentence
    assert "another GPU" not in sentence


@pytest.mark.parametrize(("role", "key"), [("sampler", "vllm.kv_cache_gib"), ("trainer", "max_tokens_per_micro_batch")])
def test_on_cpus_the_keys_are_those_of_cpus(role, key) -> None:
    text = out_of_memory.sentence(role, config(), None, None, [])
    assert key in text
    assert "GPU" not in text


def test_other_errors_and_stages_without_an_engine_are_left_alone() -> None:
    assert not out_of_memory.is_out_of_memory(ValueError("no"))
    assert not out_of_memory.is_out_of_memory(UserError("out of memory"))
    out_of_memory.refuse(ERRORS[0], "scorer", config(), None)


def test_processes_on_the_gpu_are_named_by_what_they_run(tmp_path, monkeypatch) -> None:
    executable(tmp_path, "nvidia-smi", f'[ "$1 $2" = "-i 0" ] && printf "{os.getpid()}, 500\\n1, 2000\\n7, [N/A]\\n"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    first, second = devices.gpu_processes()
    assert (first.pid, first.used, second.name) == (1, 2000 * 2**20, "this process")
    assert first.name.startswith("process 1")
    commands = {
        "41": "/v/bin/python\0/v/bin/rloo\0rollout\0--round\0",
        "42": "python\0-m\0rloo_pipeline\0worker\0--socket\0",
        "43": "/usr/bin/python3\0train.py\0",
    }
    monkeypatch.setattr(Path, "read_text", lambda path: commands[path.parent.name])
    names = [devices._process_name(int(pid)) for pid in commands]
    assert names == ["process 41 (rloo rollout)", "process 42 (rloo worker)", "process 43 (python3 train.py)"]
