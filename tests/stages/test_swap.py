"""After a swap of weights a sampler gives the completions of a new engine; each step of the swap is needed."""

import shutil
from pathlib import Path

import forks
import pytest

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.demo.character_model import tiny_qwen3
from rloo_pipeline.errors import IncompatibleEngine
from rloo_pipeline.rollout import swap_check, vllm_internals
from rloo_pipeline.rollout.engine_arguments import EngineSettings
from rloo_pipeline.rollout.requests import Request, SamplingConfig
from rloo_pipeline.rollout.sampler import Sampler

pytestmark = [pytest.mark.slow, pytest.mark.holds_vllm]

ENGINE = EngineSettings("float32", 0.5, 1, 1)
SIZES = {"hidden_size": 32, "layers": 2, "heads": 2, "key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}
HOW = SamplingConfig(1.0, 1.0, 0, None, 12)
# longer than a block of the cache, and alike, so that the second is served from it
REQUESTS = [Request([4 + (place * 7) % 12 for place in range(200)], seed, HOW) for seed in range(4)]


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Two policies that differ in every weight, with tied embeddings."""
    folder = tmp_path_factory.mktemp("policies")
    for seed in (1, 2):
        tiny_qwen3(folder / str(seed), seed, **SIZES)
    return folder / "1", folder / "2"


def sampled(sampler: Sampler) -> list[tuple[list[int], list[float]]]:
    samples_now = sampler.sample(REQUESTS, "completions")
    return [(completion.ids, completion.logps) for completion in samples_now]


def fresh(folder: Path) -> list[tuple[list[int], list[float]]]:
    return sampled(Sampler(Policy(folder), ENGINE, 256, 0))


@pytest.fixture(scope="module")
def engines(policies):
    """The completions of each policy in an engine of its own, and an engine to swap them in; a process holds one."""
    second = forks.call(fresh, policies[1])
    sampler = Sampler(Policy(policies[0]), ENGINE, 256, 0)
    return sampled(sampler), second, sampler


def test_swapped_weights_sample_as_fresh_ones_do(engines, policies) -> None:
    first, second, sampler = engines
    assert first != second
    for folder, expected in ((policies[1], second), (policies[0], first), (policies[1], second)):
        sampler.swap(Policy(folder), 256)
        assert sampled(sampler) == expected


def test_what_the_engine_holds_already_is_not_loaded_again(engines, policies, tmp_path, monkeypatch) -> None:
    _, second, sampler = engines
    sampler.swap(Policy(policies[1]), 0)
    with monkeypatch.context() as without:
        without.setattr(sampler.llm, "collective_rpc", lambda *_, **__: pytest.fail("loaded"))
        sampler.swap(Policy(Path(shutil.copytree(policies[1], tmp_path / "elsewhere"))), 256)
    assert sampled(sampler) == second


def test_a_step_of_the_swap_that_is_left_out_is_noticed(engines, policies, monkeypatch) -> None:
    """Without its step, the tied LM head stays stale, or the cache has prompts of the old policy."""
    first, _, sampler = engines
    packed = [(vllm_internals, "_repack_lm_head", lambda _: None, "weights")]  # GPUs have no packed copy
    for owner, name, left_out, why in (
        *(packed if not forks.HAS_GPU else []),
        (sampler.llm, "reset_prefix_cache", lambda: True, "cache"),
    ):
        sampler.swap(Policy(policies[0]), 256)
        assert sampled(sampler) == first
        with monkeypatch.context() as without:
            without.setattr(owner, name, left_out)
            with pytest.raises(IncompatibleEngine, match=why):
                sampler.swap(Policy(policies[1]), 256)
    sampler.swap(Policy(policies[0]), 256)
    assert sampled(sampler) == first, "and what was given up is not taken for loaded"


def test_an_engine_that_answers_as_before_a_swap_has_not_swapped(engines, policies, monkeypatch) -> None:
    """In 16 or 8 bits and with large weights nothing else would notice it."""
    *_, sampler = engines
    sampler.swap(Policy(policies[0]), 256)
    with monkeypatch.context() as without:
        without.setattr(vllm_internals, "reload_weights", lambda *_: None)
        without.setattr(swap_check, "check_weights", lambda *_: None)
        with pytest.raises(IncompatibleEngine, match="the weights of another policy"):
            sampler.swap(Policy(policies[1]), 256)


def test_a_swap_of_large_weights_is_checked_once(engines, policies, monkeypatch) -> None:
    *_, sampler = engines
    monkeypatch.setattr(swap_check, "ALWAYS_CHECKED_BYTES", 0)
    monkeypatch.setattr(sampler, "swap_checked", False)
    checked = []
    check = swap_check.check_weights
    monkeypatch.setattr(
        swap_check, "check_weights", lambda *arguments: checked.append(arguments[1]) or check(*arguments)
    )
    for folder in (policies[1], policies[0], policies[1]):
        sampler.swap(Policy(folder), 256)
    assert len(checked) == 1


def test_an_engine_that_sleeps_is_woken_before_anything_is_done_with_it(engines, policies, monkeypatch) -> None:
    """vLLM's sleep and wake_up are replaced, except those that only hold requests back; everything else is real."""
    _, second, sampler = engines
    llm, messages = sampler.llm, list[str]()
    hold, go_on = llm.sleep, llm.wake_up
    monkeypatch.setitem(sampler.settings, "enable_sleep_mode", True)
    monkeypatch.setattr(llm, "sleep", lambda level: messages.append(f"sleep {level}") if level else hold(level=0))
    monkeypatch.setattr(llm, "wake_up", lambda tags=None: go_on(tags=tags) if tags else messages.append("wake"))
    load = llm.collective_rpc
    monkeypatch.setattr(
        llm, "collective_rpc", lambda method, **options: messages.append(method) or load(method, **options)
    )
    sampler.swap(Policy(policies[0]), 256)
    messages.clear()
    for _ in range(2):
        sampler.leave_gpu()
    assert messages == ["sleep 1"]
    assert sampler.llm is llm
    sampler.swap(Policy(policies[1]), 256)
    assert messages == ["sleep 1", "wake", "reload_weights"]
    assert sampled(sampler) == second
    sampler.leave_gpu()
    assert sampled(sampler) == second
    assert messages[3:] == ["sleep 1", "wake"]
