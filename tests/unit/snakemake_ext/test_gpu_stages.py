"""Stages with GPUs are limited to those of this machine; here these are only names."""

from types import SimpleNamespace

import pytest
from helpers import mini
from snakemake.resources import Resources

from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices
from rloo_pipeline.snakemake_ext import steps

COMMANDS = {
    "rollout": "rloo rollout --prompts {input.prompts}",
    "reference": "rloo reference",
    "update": "rloo update",
    "reward_model": "rloo reward-model",
    "score": "rloo score",
    "score_alone": "rloo score --only x",
    "mine": "python mine.py",
}


def limited(given: dict[str, int], *configs: dict, **requests: int) -> tuple[int | None, dict[str, int | None]]:
    """The limit, and what each rule takes of it."""
    rules = [
        SimpleNamespace(
            name=name,
            shellcmd=command,
            resources=Resources.from_mapping({} if name == "score" else {"gpu_stages": requests.get(name, 1)}),
        )
        for name, command in COMMANDS.items()
    ]
    limits = Resources.from_mapping(given)
    steps.limit(rules, limits, [Config(**mini(**changes)) for changes in configs or [{}]])
    taken = {rule.name: rule.resources["gpu_stages"].value for rule in rules if "gpu_stages" in rule.resources}
    return limits["gpu_stages"].value if "gpu_stages" in limits else None, taken


@pytest.fixture
def gpus(monkeypatch):
    """A machine with four GPUs."""
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")


def test_stages_count_by_the_gpus_that_they_take(gpus) -> None:
    ones = {"rollout": 1, "reference": 1, "update": 1, "reward_model": 1, "score_alone": 0, "mine": 1}
    assert limited({}) == (4, ones)
    wide = {"vllm": {"tensor_parallel_size": 2}, "deepspeed": {"processes": 3}}
    assert limited({}, wide) == (4, ones | {"rollout": 2, "update": 3, "reward_model": 3})
    assert limited({}, {}, wide)[1]["update"] == 3, "the run of an experiment that takes most"
    assert limited({}, {"deepspeed": {"processes": 8, "zero_stage": 3}})[1]["reference"] == 4, "no more than there are"
    assert limited({}, rollout=0)[1]["rollout"] == 0, "set-resources may say that a stage needs none"


def test_a_number_of_the_user_counts_stages(gpus) -> None:
    assert limited({"gpu_stages": 2}, {"deepspeed": {"processes": 3}})[1]["update"] == 1


def test_without_gpus_nothing_is_limited(gpus, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert limited({})[0] is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    assert limited({})[0] is None
