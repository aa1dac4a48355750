"""An engine in a process of its own, as on GPUs, samples the bytes of one in this process, after swaps too."""

import json
import os
import pickle
import signal
import sys
import threading
from pathlib import Path
from typing import NamedTuple

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
from rloo_pipeline.rollout.requests import Completion, Request, SamplingConfig
from rloo_pipeline.rollout.sampler import Sampler
from rloo_pipeline.runtime import devices, output

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.holds_vllm]

SIZES = {"hidden_size": 32, "layers": 2, "heads": 2, "key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}
NO_BINDING = ("VLLM_CPU_OMP_THREADS_BIND", "nobind")
"""Lets an engine on CPUs have more ranks than the machine has NUMA nodes."""
RANKS = min(2, len(devices.visible_gpus()) or 2)
"""Ranks of the engine of which all processes are looked at."""
REQUESTS = [
    Request(
        [4 + (place * 7) % 12 for place in range(20 + seed)], seed, SamplingConfig(1.0, 1.0, 0, None, 12 + seed % 5)
    )
    for seed in range(24)
]
EVEN = {"type": "integer", "multipleOf": 2, "minimum": 2, "maximum": 4}
"""A form for which vLLM does not take xgrammar, which knows this fault of tokenizers."""
SCHEMA = {"type": "object", "properties": {"a b": EVEN}, "required": ["a b"], "additionalProperties": False}


def opened(folder: Path, separate: bool) -> Sampler:
    """An engine in this process, or in one of its own."""
    engine_process.SEPARATE_ON_CPUS = separate
    sampler = Sampler(Policy(folder), EngineSettings("float32", 0.5, 1, 1), 256, 0)
    assert vllm_internals.is_separate() == separate
    return sampler


def sampled(sampler: Sampler, folders: list[Path]) -> list[Completion]:
    """The completions of each policy in turn."""
    completions: list[Completion] = []
    for folder in folders:
        sampler.swap(Policy(folder), 256)
        completions += sampler.sample(REQUESTS, "completions")
    return completions


def masked(sampler: Sampler) -> list[Completion]:
    """Completions in the form of SCHEMA."""
    keys = GenerationKwargs.model_validate({"structured_outputs": {"json": SCHEMA}}).for_vllm
    how = SamplingConfig(1.0, 1.0, 0, None, 200, keys)
    return sampler.sample([Request([5, 9, 12], seed, how) for seed in range(8)], "completions")


def sampled_inside(folders: list[Path]) -> list[Completion]:
    return sampled(opened(folders[0], False), folders)


class Separate(NamedTuple):
    """The samples of an engine in a process of its own, from before the process that started it was killed."""

    engine: int
    """The engine's process."""
    completions: list[Completion]
    masked: list[Completion]


START = """
import os, pickle, sys, time
from pathlib import Path
if __name__ == "__main__":
    from test_engine_process import masked, opened, sampled
    output, *folders = map(Path, sys.argv[1:])
    sampler = opened(folders[0], True)
    [engine] = sampler.llm.llm_engine.engine_core.resources.engine_manager.processes
    results = engine.pid, sampled(sampler, folders), masked(sampler)
    output.with_suffix(".part").write_bytes(pickle.dumps(results))
    output.with_suffix(".part").rename(output)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """A policy, another one, and the first again. Their tokenizers name a class for which no token is a space, and
    which adds tokens that the models lack.
    """
    top, tokenizer = tmp_path_factory.mktemp("policies"), bpe_tokenizer(["a b"], 300, 256)
    other_class = {"tokenizer_class": "LlamaTokenizerFast"}
    for seed in (1, 2):
        write_qwen3(top / str(seed), seed, tokenizer, **SIZES)
        config = top / str(seed) / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | other_class))
    return [top / "1", top / "2", top / "1"]


@pytest.fixture(scope="module")
def separate(folders, tmp_path_factory) -> Separate:
    top = tmp_path_factory.mktemp("separate")
    program, log, output = (top / name for name in ("start.py", "log", "output"))
    program.write_text(START)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = forks.start(forks.Command(str(program), list(map(str, [output, *folders])), environment), log)
    wait_until(lambda: output.exists() or process.poll() is not None)
    assert output.exists(), log.read_text()
    process.kill()
    process.wait()
    return Separate(*pickle.loads(output.read_bytes()))


def test_the_bytes_do_not_depend_on_the_process_of_the_engine(folders, separate) -> None:
    inside = forks.call(sampled_inside, folders)
    assert separate.completions == inside
    first, second, again = inside[: len(REQUESTS)], inside[len(REQUESTS) : -len(REQUESTS)], inside[-len(REQUESTS) :]
    assert first == again != second


def test_the_masks_of_structured_outputs_are_of_the_tokens_in_tokenizer_json(separate) -> None:
    """The engine's process loads the tokenizer itself; with that of the class, no token would be a space."""
    ended = [json.loads(completion.text) for completion in separate.masked if completion.finish_reason == "stop"]
    assert ended
    assert all(each in ({"a b": 2}, {"a b": 4}) for each in ended)


def test_an_engine_ends_with_the_process_that_started_it(separate) -> None:
    wait_until(lambda: has_ended(separate.engine))


def test_the_processes_of_an_engine_write_into_the_log_of_the_stage_that_they_serve_and_their_death_is_an_error(
    tmp_path, monkeypatch
) -> None:
    tiny_qwen3(tmp_path / "model", 0, **SIZES)
    monkeypatch.setattr(engine_process, "SEPARATE_ON_CPUS", True)
    monkeypatch.setenv(*NO_BINDING)
    policy = Policy(tmp_path / "model")
    logs = [tmp_path / name for name in ("first.log", "second.log")]
    with output.standard_output_to(os.open(logs[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        sampler = Sampler(policy, EngineSettings("float32", 0.5, 1, RANKS), 256, 0)
        [engine] = sampler.llm.llm_engine.engine_core.resources.engine_manager.processes
    workers = [
        one for one in psutil.Process(engine.pid).children() if "resource_tracker" not in " ".join(one.cmdline())
    ]
    assert len(workers) in (RANKS, RANKS - 1), "on a GPU, the engine's process is its only worker"
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


def test_what_kept_a_worker_of_an_engine_from_starting_is_the_error(tmp_path, monkeypatch) -> None:
    """Other than "WorkerProc initialization failed", which is all that vLLM tells the engine. On CPUs even one worker
    has a process of its own.
    """
    tiny_qwen3(tmp_path / "model", 0, **SIZES)
    monkeypatch.setattr(engine_process, "SEPARATE_ON_CPUS", True)
    arguments = engine_arguments.arguments
    broken = {"load_format": "no such format"}
    monkeypatch.setattr(engine_arguments, "arguments", lambda *given: arguments(*given) | broken)
    with pytest.raises(RuntimeError, match=r"vLLM's engine failed: ValueError: .*no such format"):
        Sampler(Policy(tmp_path / "model"), EngineSettings("float32", 0.5, 1, 1), 256, 0)
