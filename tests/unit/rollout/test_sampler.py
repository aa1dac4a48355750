"""What the sampler does where there is nothing to sample, and where samples are broken."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import mini

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Config, Rollout
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import engine_arguments, groups
from rloo_pipeline.rollout.engine_arguments import EngineSettings
from rloo_pipeline.rollout.requests import Completion, Request, SamplingConfig, params_of
from rloo_pipeline.rollout.sampler import Sampler
from rloo_pipeline.runtime import caches

HOW = SamplingConfig(1.0, 1.0, 0, None, 8)


def test_an_engine_that_left_the_gpu_is_not_started_to_sample_nothing() -> None:
    engine = Sampler.__new__(Sampler)
    engine.llm = None
    assert engine.sample([], "completions") == []
    assert engine.llm is None


def test_an_engine_that_sums_in_a_fixed_order_does_not_count_as_compiled_by_one_that_does_not(monkeypatch) -> None:
    """Two of them could otherwise write vLLM's cache at once."""
    engine, keys = Sampler.__new__(Sampler), list[str]()
    engine.settings, engine.policy = {"model": "policies/00000"}, SimpleNamespace(config={})
    monkeypatch.setattr(caches, "compiling", lambda _, key: keys.append(key))
    for value in ("0", "1", "1"):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        engine._compiling("0.32.0")
    assert keys[0] != keys[1] == keys[2]


def test_samples_of_a_broken_adapter_name_its_folder_and_not_that_of_its_base() -> None:
    broken = Completion([5], "1", [float("nan")], "stop")
    engine: Any = SimpleNamespace(policy=Policy(Path("rounds/00003/policy")), settings={"model": "models/base"})
    engine.sample = lambda requests, *_: [broken] * len(requests)
    wanted = groups.WholeGroups([{"prompt_id": "a", "prompt_ids": [4]}], 2, HOW, 0, ("rollout", 4))
    config = Config.model_validate(mini())
    with pytest.raises(UserError, match=r"^rounds/00003/policy: the policy's log-probs are not finite"):
        groups.sample_groups(engine, config, wanted)


def test_rollouts_are_sampled_with_quantized_weights_and_evaluations_are_not(tiny_model, monkeypatch) -> None:
    config = Config.model_validate(mini(rollout={"quantization": "fp8_per_block"}, model={"dtype": "bfloat16"}))
    given: list[str | None] = []
    monkeypatch.setattr(groups, "Sampler", lambda _policy, settings, *_: given.append(settings.quantization))
    for for_rollouts in (True, False):
        prompts: Any = SimpleNamespace(longest=10, about_images=None)
        groups.load_sampler(Policy(tiny_model), config, prompts, 8, for_rollouts)
    assert given == ["fp8_per_block", None]


def test_on_cpus_quantized_rollouts_have_one_scheme(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(engine_arguments.devices, "device_type", lambda: "cpu")
    with pytest.raises(UserError, match=r"^rollout.quantization: fp8_per_block needs a GPU; on CPUs set fp8_per_chan"):
        Sampler(Policy(tiny_model), EngineSettings("bfloat16", 0.9, 1, 1, quantization="fp8_per_block"), 64, 0)


def test_vllm_splits_the_cache_of_a_sequence_over_the_gpus_that_are_asked_for(tiny_model, monkeypatch) -> None:
    config = Config.model_validate(mini(vllm={"tensor_parallel_size": 4, "decode_context_parallel_size": 2}))
    given: list[EngineSettings] = []
    monkeypatch.setattr(groups, "Sampler", lambda _policy, settings, *_: given.append(settings))
    prompts: Any = SimpleNamespace(longest=10, about_images=None)
    groups.load_sampler(Policy(tiny_model), config, prompts, 8)
    settings = engine_arguments.arguments(Policy(tiny_model), given[0], 64, 0)
    assert (settings["tensor_parallel_size"], settings["decode_context_parallel_size"]) == (4, 2)


def test_vllm_gets_each_key_of_rollouts_and_evaluations_are_not_cut_to_likely_tokens() -> None:
    rollout = Rollout(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, max_completion_length=48)
    for sampling, expected in (
        (SamplingConfig.of_rollouts(rollout), (0.7, 0.9, 20, 0.05, 48)),
        (SamplingConfig.of_evaluations(rollout, 0.5, 99), (0.5, 1.0, 0, 0.0, 99)),
    ):
        params = params_of(Request([4], 11, sampling), [2, 3], [7])
        assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == expected
        assert (params.seed, params.stop_token_ids, params.logit_bias.keys()) == (11, [2, 3], {7})
