"""After a swap an engine of any class computes with the new policy's weights alone, or refuses the swap.

A model with a tied LM head is in test_swap.py.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import forks
import model_folders
import pytest
from rounding import within
from test_swap import ENGINE, REQUESTS, sampled

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.rollout import engine_arguments, swap_check, vllm_internals
from rloo_pipeline.rollout.sampler import Sampler

pytestmark = [pytest.mark.slow, pytest.mark.long]

KINDS = ["untied", "qwen3_moe", "mixtral", "olmo2", "adapter"]


def policy(kind: str, folder: Path, seed: int) -> Path:
    """A model, or an adapter on one."""
    model_folder = folder / f"{kind}-{seed}"
    return (
        model_folders.adapter(folder / "untied-1", model_folder, seed)
        if kind == "adapter"
        else model_folders.build(model_folder, seed, kind)
    )


def swapped(kind: str, folder: Path) -> dict[str, Any]:
    """The completions of a new engine, of the same one with another policy, and with the first policy again; how far it
    is from transformers after each swap; and the adapter of each request.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    adapters: list[Path | None] = []
    add_request = LLMEngine.add_request

    def add(*arguments: Any, lora_request: Any, **named: Any) -> str:
        adapters.append(lora_request and Path(lora_request.lora_path))
        return add_request(*arguments, lora_request=lora_request, **named)

    with mock.patch.object(LLMEngine, "add_request", add):
        return {**engine_results(kind, folder), "adapters": adapters}


def engine_results(kind: str, folder: Path) -> dict[str, Any]:
    """As `swapped`, without the adapters."""
    first, second = (policy(kind, folder, seed) for seed in (1, 2))
    sampler = Sampler(Policy(first), ENGINE, model_folders.CONTEXT, 0)
    result: dict[str, Any] = {"completions": [sampled(sampler)], "differences": []}
    mean_difference = swap_check.mean_difference

    def noted(*arguments: Any) -> float:
        result["differences"].append(mean_difference(*arguments))
        return result["differences"][-1]

    swap_check.mean_difference = noted
    for policy_folder in (second, first):
        sampler.swap(Policy(policy_folder), model_folders.CONTEXT)
        result["completions"].append(sampled(sampler))
    if kind == "qwen3_moe":  # experts as vLLM leaves them, when it reloads them
        reset, vllm_internals._reset_packed_experts = vllm_internals._reset_packed_experts, lambda _: None
        try:
            sampler.swap(Policy(second), model_folders.CONTEXT)
        except IncompatibleEngine as why:
            result["refused"] = str(why)
        vllm_internals._reset_packed_experts = reset
    swap_check.mean_difference = mean_difference
    sampler.leave_gpu()
    if kind == "adapter":
        result["policies"] = first, second
        result["completions"].append(sampled(sampler))
        try:
            sampler.swap(Policy(folder / "untied-1"), model_folders.CONTEXT)
        except IncompatibleEngine as why:
            result["without"] = str(why)
        sampler.leave_gpu()
        result["refused"] = refused(first)
    return result


def refused(adapter: Path) -> str:
    """The error where vLLM gets the whole paths that PEFT writes for `all-linear`: it finds no fused layer by them."""
    settings = engine_arguments.adapter_arguments
    engine_arguments.adapter_arguments = lambda policy: {
        **settings(policy),
        "lora_target_modules": policy.adapter_modules,
    }
    try:
        Sampler(Policy(adapter), ENGINE, model_folders.CONTEXT, 0)
    except UserError as why:
        return str(why)
    finally:
        engine_arguments.adapter_arguments = settings
    return ""


def all_kinds(folder: Path) -> dict[str, dict[str, Any]]:
    return {kind: swapped(kind, folder) for kind in KINDS}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results by kind, from one process with one engine after the other."""
    return forks.call(all_kinds, tmp_path_factory.mktemp("kinds"))


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_gets_its_first_policy_back_samples_as_a_fresh_one_to_the_bit(results, kind) -> None:
    fresh, other, *again = results[kind]["completions"]
    assert other != fresh
    assert again == [fresh] * len(again)


@pytest.mark.parametrize("kind", KINDS)
def test_a_swapped_engine_is_as_near_to_transformers_as_float32_is(results, kind) -> None:
    assert max(results[kind]["differences"][:2]) < within(1e-4, 2e-3)


def test_experts_that_vllm_leaves_unpacked_are_noticed(results) -> None:
    assert "qwen3_moe-2" in results["qwen3_moe"]["refused"]
    assert results["qwen3_moe"]["differences"][-1] > 0.1


def test_modules_of_an_adapter_that_vllm_does_not_apply_are_named(results) -> None:
    named = ", ".join(f"{name}_proj (2 times)" for name in ("gate", "k", "q", "up", "v"))
    assert f"vLLM has no layers for the adapter's {named}" in results["adapter"]["refused"]


def test_an_engine_with_an_adapter_serves_nothing_without_it(results) -> None:
    """On CPUs vLLM answers such requests with the adapter: its kernels take index -1, for none, as the last one."""
    first, second = results["adapter"]["policies"]
    adapters, asked = results["adapter"]["adapters"], len(REQUESTS)
    probes = (len(adapters) - 4 * asked) // 4
    served = [(first, asked + probes), (second, probes + asked + probes), (first, probes + asked + asked)]
    assert adapters == [policy for policy, count in served for _ in range(count)]
    assert results["adapter"]["without"] == "another model", "its base alone gets an engine of its own"
    assert not any(results["untied"]["adapters"])
