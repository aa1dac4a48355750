"""An engine in a process of its own, as on GPUs, samples the bytes of one in this process, after swaps too."""

import json
import os
import pickle
import signal
import sys
import threading
from pathlib import Path

import forks
import psutil
import pytest
from helpers import has_ended, wait_until

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import out_of_memory
from rloo_pipeline.config.generation import GenerationKwargs
from rloo_pipeline.demo.character_model import tiny_qwen3, write_qwen3
from rloo_pipeline.demo.text_model import bpe_tokenizer
from rloo_pipeline.rollout import engine_arguments, engine_process, vllm_internals
from rloo_pipeline.rollout.engine_arguments import EngineSettings
from rloo_pipeline.rollout.requests import Request, SamplingConfig
from rloo_pipeline.rollout.sampler import Sampler
from rloo_pipeline.runtime import output

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.holds_vllm]

SIZES = {"hidden_size": 32, "layers": 2, "heads": 2, "key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}
NO_BINDING = ("VLLM_CPU_OMP_THREADS_BIND", "nobind")
"""Lets an engine on CPUs have more ranks than the machine has NUMA nodes."""
REQUESTS = [
    Request(
        [4 + (place * 7) % 12 for place in range(20 + seed)], seed, SamplingConfig(1.0, 1.0, 0, None, 12 + seed % 5)
    )
    for seed in range(24)
]


def opened(folder: Path, separate: bool) -> Sampler:
    """An engine in this process, or in one of its own."""
    engine_process.SEPARATE_ON_CPUS = separate
    sampler = Sampler(Policy(folder), EngineSettings("float32", 0.5, 1, 1), 256, 0)
    assert vllm_internals.is_separate() == separate
    return sampler


def sampled(sampler: Sampler, folders: list[Path]) -> list[object]:
    """The completions of each policy in turn."""
    completions: list[object] = []
    for folder in folders:
        sampler.swap(Policy(folder), 256)
        completions += sampler.sample(REQUESTS, "completions")
    return completions


def sampled_inside(folders: list[Path]) -> list[object]:
    return sampled(opened(folders[0], False), folders)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_processes_of_an_engine_write_into_the_log_of_the_stage_that_they_serve_and_their_death_is_an_error(
    tmp_path, monkeypatch, ranks
) -> None:
    tiny_qwen3(tmp_path / "model", 0, **SIZES)
    monkeypatch.setattr(engine_process, "SEPARATE_ON_CPUS", True)
    monkeypatch.setenv(*NO_BINDING)
    policy = Policy(tmp_path / "model")
    logs = [tmp_path / name for name in ("first.log", "second.log")]
    with output.standard_output_to(os.open(logs[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        sampler = Sampler(policy, EngineSettings("float32", 0.5, 1, ranks), 256, 0)
        [engine] = sampler.llm.llm_engine.engine_core.resources.engine_manager.processes
    workers = [
        one for one in psutil.Process(engine.pid).children() if "resource_tracker" not in " ".join(one.cmdline())
    ]
    assert len(workers) in (ranks, ranks - 1), "on a GPU, the engine's process is its only worker"
    files = [
        Path(f"/proc/{pid}/fd/{number}") for pid in (engine.pid, *(one.pid for one in workers)) for number in (1, 2)
    ]
    assert {file.readlink() for file in files} == {logs[0]}
    with output.standard_output_to(os.open(logs[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        sampler.swap(policy, 256)
        places = {file.readlink() for file in files}
    assert places == {logs[1]}
    os.kill(engine.pid, signal.SIGSTOP)
    threading.Timer(1.0, engine.kill).start()  # as by the kernel, where host memory is too small for what sleeps
    with pytest.raises(Exception, match="EngineCore encountered an issue"):
        sampler.llm.reset_prefix_cache()
    wait_until(lambda: all(has_ended(one.pid) for one in workers))


START = """
import os, pickle, sys, time
from pathlib import Path
if __name__ == "__main__":
    from test_engine_process import opened, sampled
    output, *folders = map(Path, sys.argv[1:])
    sampler = opened(folders[0], True)
    [engine] = sampler.llm.llm_engine.engine_core.resources.engine_manager.processes
    output.with_suffix(".part").write_bytes(pickle.dumps((engine.pid, sampled(sampler, folders))))
    output.with_suffix(".part").rename(output)
    time.sleep(600)
"""


def test_the_bytes_do_not_depend_on_the_process_of_the_engine_which_ends_with_the_one_that_started_it(tmp_path) -> None:
    for seed in (1, 2):
        tiny_qwen3(tmp_path / str(seed), seed, **SIZES)
    folders = [tmp_path / "1", tmp_path / "2", tmp_path / "1"]
    inside = forks.call(sampled_inside, folders)
    program, log, output = (tmp_path / name for name in ("start.py", "log", "output"))
    program.write_text(START)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = forks.start(forks.Command(str(program), list(map(str, [output, *folders])), environment), log)
    wait_until(lambda: output.exists() or process.poll() is not None)
    assert output.exists(), log.read_text()
    process.kill()
    process.wait()
    engine, outside = pickle.loads(output.read_bytes())
    assert outside == inside
    first, second, again = inside[: len(REQUESTS)], inside[len(REQUESTS) : -len(REQUESTS)], inside[-len(REQUESTS) :]
    assert first == again != second
    wait_until(lambda: has_ended(engine))


def test_the_masks_of_structured_outputs_are_of_the_tokens_in_tokenizer_json(tmp_path, monkeypatch) -> None:
    """The engine's process loads the tokenizer itself; with that of the class, no token would be a space."""
    write_qwen3(tmp_path, 0, bpe_tokenizer(["a b"], 300, 256), **SIZES)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}))
    even = {"type": "integer", "multipleOf": 2, "minimum": 2, "maximum": 4}  # not of xgrammar, which knows this fault
    schema = {"type": "object", "properties": {"a b": even}, "required": ["a b"], "additionalProperties": False}
    keys = GenerationKwargs.model_validate({"structured_outputs": {"json": schema}}).for_vllm
    monkeypatch.setattr(engine_process, "SEPARATE_ON_CPUS", True)
    sampler = Sampler(Policy(tmp_path), EngineSettings("float32", 0.5, 1, 1), 256, 0)
    how = SamplingConfig(1.0, 1.0, 0, None, 200, keys)
    sampled = sampler.sample([Request([5, 9, 12], seed, how) for seed in range(8)], "completions")
    ended = [json.loads(completion.text) for completion in sampled if completion.finish_reason == "stop"]
    assert ended
    assert all(each in ({"a b": 2}, {"a b": 4}) for each in ended)


def test_what_ended_the_process_of_an_engine_is_the_error(tmp_path, monkeypatch) -> None:
    tiny_qwen3(tmp_path / "model", 0, **SIZES)
    settings = engine_arguments.cpu_arguments
    monkeypatch.setattr(
        engine_arguments, "cpu_arguments", lambda *sizes: settings(*sizes) | {"kv_cache_memory_bytes": 9}
    )
    monkeypatch.setattr(engine_process, "SEPARATE_ON_CPUS", True)
    with pytest.raises(RuntimeError, match="vLLM's engine failed: ValueError: No available memory") as caught:
        Sampler(Policy(tmp_path / "model"), EngineSettings("float32", 0.5, 1, 1), 256, 0)
    assert out_of_memory.is_out_of_memory(caught.value)


def test_what_kept_a_worker_of_a_split_engine_from_starting_is_the_error(tmp_path, monkeypatch) -> None:
    """Other than "WorkerProc initialization failed", which is all that vLLM tells the engine."""
    tiny_qwen3(tmp_path / "model", 0, **SIZES)
    policy = Policy(tmp_path / "model")
    monkeypatch.setattr(engine_process, "SEPARATE_ON_CPUS", True)
    monkeypatch.setenv(*NO_BINDING)
    arguments = engine_arguments.arguments
    broken = {"load_format": "no such format"}
    monkeypatch.setattr(engine_arguments, "arguments", lambda *given: arguments(*given) | broken)
    with pytest.raises(RuntimeError, match=r"vLLM's engine failed: ValueError: .*no such format"):
        Sampler(policy, EngineSettings("float32", 0.5, 1, tensor_parallel_size=2), 256, 0)
