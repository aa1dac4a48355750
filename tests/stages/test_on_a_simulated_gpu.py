"""Updates on a GPU are those on CPUs. The GPU is simulated: its tensors cannot be mixed with tensors on the CPU.

It shows neither CUDA's kernels, streams and memory, nor several ranks.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import forks
import pytest
import torch
from helpers import ROOT, Round
from simulated_gpu import device

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.demo.character_model import tiny_qwen3
from rloo_pipeline.training import self_check

pytestmark = [pytest.mark.slow, pytest.mark.long]

CASES = {
    "KL in the loss, two passes, recomputed activations": {
        "algorithm": {
            "beta": 0.1,
            "kl": {"placement": "loss", "estimator": "k3"},
            "num_iterations": 2,
            "mismatch": {"correction": "token_tis", "max": 2.0},
            "importance_sampling_level": "token",
        },
        "deepspeed": {"gradient_checkpointing": "offload"},
    },
    "ZeRO 3": {"deepspeed": {"zero_stage": 3}},
    "ZeRO 2, optimizer in host memory": {"deepspeed": {"zero_stage": 2, "offload": {"optimizer": "cpu"}}},
    "Muon": {"update": {"optimizer": "muon"}},
    "LoRA in bfloat16": {"model": {"dtype": "bfloat16"}, "update": {"lora": {"r": 4, "lora_alpha": 8}}},
}
TOLERANCES = {"Muon": 0.05, "LoRA in bfloat16": 0.4}
"""Largest distance of the policies, as a share of the second update, where not everything is computed in float32."""
MIXED = """
import pathlib, sys
sys.path.insert(0, sys.argv[2])
from simulated_gpu import device
device.load(pathlib.Path(sys.argv[1]))
import torch
here, there = torch.ones(2, 2, device="cuda"), torch.ones(2, 2)
assert (here @ here)[torch.tensor([1])].cpu().tolist() == [[2.0, 2.0]] and float((here * there[0, 0]).sum()) == 4
for mix in (torch.add, torch.matmul, torch.Tensor.mul_, lambda *both: torch.cat(both)):
    for both in ((here, there), (there, here)):
        try:
            mix(*both)
        except RuntimeError as error:
            assert "on the same device" in str(error), error
        else:
            sys.exit(f"{mix} takes tensors of two devices")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """The simulated GPU, compiled."""
    if torch.version.cuda is not None:
        pytest.skip("torch is built for real GPUs")
    if shutil.which("g++") is None:
        assert "RLOO_REQUIRE_COMPILER" not in os.environ
        pytest.skip("g++ is not installed")
    return device.build(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="module")
def on_gpu(library, tmp_path_factory) -> Iterator[Callable[..., int]]:
    """Runs commands of `rloo` on the simulated GPU, several in a process that keeps their engines. Returns how often
    they have read its memory.
    """
    log = tmp_path_factory.mktemp("gpu") / "log"
    environment = os.environ | forks.ENVIRONMENT | {"DS_ACCELERATOR": "cuda"}
    words = [sys.executable, device.__file__, str(library)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with log.open("w") as errors, subprocess.Popen(words, stderr=errors, **pipes) as process:

        def run(*commands: tuple[object, ...]) -> int:
            words = [[str(word) for word in command] for command in commands]
            print(json.dumps(words), file=process.stdin, flush=True)
            assert process.stdout.readline() == "0\n", log.read_text()
            return int(device.reads_of(library).read_text())

        yield run
        process.stdin.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    tiny_qwen3(folder, 3, hidden_size=32, layers=2, heads=2, key_value_heads=1, head_dim=32, intermediate_size=64)
    self_check.load_or_run(Policy(folder)).write(folder)
    return folder


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return sum(float((one[name].double() - other[name].double()).square().sum()) for name in one) ** 0.5


@pytest.mark.parametrize("case", CASES)
def test_two_updates_on_a_gpu_are_those_on_cpus(on_gpu, model, tmp_path, case) -> None:
    cpu, gpu = (Round(tmp_path / name, model, **CASES[case]) for name in ("cpu", "gpu"))
    for number in (1, 2):
        outcome = cpu.write(number).update(number)
        assert outcome.returncode == 0, outcome.stderr
        on_gpu(gpu.write(number).update_arguments(number))
    step = distance(cpu.weights(1), cpu.weights(2))
    assert distance(cpu.weights(2), gpu.weights(2)) < TOLERANCES.get(case, 1e-4) * step
    states = [manifest.verify_manifest(each.run / "trainer" / "00002").digests for each in (cpu, gpu)]
    assert states[0].keys() == states[1].keys()
    differ = {name for name in states[0] if states[0][name] != states[1][name]}
    assert all(name.endswith((".safetensors", ".pt")) for name in differ), differ


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_more_micro_batches_read_no_more_memory_of_the_gpu(on_gpu, model, tmp_path, zero_stage) -> None:
    """The host waits for a GPU whose memory it reads. ZeRO 3 also reads some to compare the ranks' first two passes."""
    reads = []
    for tokens in (1, 60):  # many micro-batches, and some
        section = {"zero_stage": zero_stage, "max_tokens_per_micro_batch": tokens}
        each = Round(tmp_path / str(tokens), model, deepspeed=section)
        reads.append(on_gpu(each.write(1).update_arguments(1)))
    assert reads[0] == reads[1] > 0


def test_engines_that_leave_a_gpu_and_return_are_those_that_stayed(on_gpu, model, tmp_path) -> None:
    """A trainer and a model for log-probs; their worker's process has neither on the GPU between two stages."""
    changes = {"rounds": 3, "model": {"dtype": "bfloat16"}}
    cold, warm = (Round(tmp_path / name, model, **changes) for name in ("cold", "warm"))

    def commands(each: Round, number: int, policy: Path) -> list[tuple[object, ...]]:
        each.write(number, policy=Policy(policy).digest)
        log, table = each.run / f"{number}.log", each.run / f"{number}.parquet"
        shard = each.run / "rounds" / f"{number:05d}" / "rollouts" / "000.parquet"
        scored = "reference", "--policy", model, "--rollouts", shard, "--output", table, f"--log={log}"
        return [scored, each.update_arguments(number)]

    for number, policy in ((1, model), (2, cold.policy(1))):
        for command in commands(cold, number, policy):
            on_gpu(command)
    on_gpu(*commands(warm, 1, model), *commands(warm, 2, cold.policy(1)))
    for number in (1, 2):
        assert (warm.run / f"{number}.parquet").read_bytes() == (cold.run / f"{number}.parquet").read_bytes()
        assert warm.weights(number).keys() == cold.weights(number).keys()
        assert distance(warm.weights(number), cold.weights(number)) == 0
    states = [manifest.verify_manifest(each.run / "trainer" / "00002").digests for each in (cold, warm)]
    assert states[0] == states[1]


def test_the_simulated_gpu_takes_no_tensors_on_the_cpu(library) -> None:
    subprocess.run([sys.executable, "-c", MIXED, library, ROOT / "tests"], check=True, timeout=300)
