"""tools/bench/gpu.py: the FLOPs that it counts, its measurements on a CPU, and its messages about missing packages."""

import json
import os
import re
import subprocess
import sys

import forks
import pytest
from helpers import ROOT, succeeded

SCRIPT = ROOT / "tools" / "bench" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu

    yield gpu
    for name in ("gpu", "shapes"):
        del sys.modules[name]


def measured(tmp_path, *arguments: str, **environment: str) -> dict[str, dict]:
    output = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--dtype", "float32", "--size", "tiny", "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    succeeded(forks.run(SCRIPT, [*options, "--prompts", "2", "--steps", "2", *arguments], environment))
    return json.loads(output.read_text())


def test_the_flops_of_a_step_are_those_that_torch_counts(gpu) -> None:
    """All but attention, which torch counts as if every token attended to every other one."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    size, prompt, completion = gpu.SIZES["tiny"], 9, 16
    model = gpu.model(size, "cpu", "float32", "eager")
    ids = torch.arange(prompt + completion).unsqueeze(0)
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, logits_to_keep=completion).logits.sum().backward()
    by_operation = {str(operation): count for operation, count in counted.get_flop_counts()["Global"].items()}
    products = by_operation.pop("aten.mm") + by_operation.pop("aten.addmm")
    ((_, attention),) = by_operation.items()
    tokens = prompt + completion
    causal = attention * (tokens * (tokens + 1) // 2) // tokens**2
    assert gpu.flops(size, [prompt], [completion]) == products + causal


def test_a_prompt_that_completions_share_counts_once(gpu) -> None:
    size = gpu.SIZES["tiny"]
    one, two, four = (gpu.flops(size, [10], [5] * count) for count in (1, 2, 4))
    assert four - two == 2 * (two - one) < 2 * one


@pytest.fixture
def without(tmp_path) -> dict[str, str]:
    """Environment variables of a machine with only torch, transformers and peft."""
    for name in ("trl", "deepspeed", "vllm", "pydantic"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no module {name}', name={name!r})")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


@pytest.mark.slow
def test_our_step_without_deepspeed_is_measured_on_any_device(tmp_path, without) -> None:
    """It imports no more than what is there."""
    row = measured(tmp_path, "--sides", "plain", **without)["plain"]
    assert 0 < row["model_flops_utilisation"] < 1
    rates = row["tokens_per_s"]
    assert 0 < rates["min"] <= rates["value"] <= rates["max"]
    assert 0.1 < row["peak_memory_gb"] < 4


@pytest.mark.slow
def test_a_step_of_compiled_layers_is_measured_with_their_graphs(gpu, monkeypatch) -> None:
    """By a compiler that only traces, since C++ would take most of a minute."""
    import torch

    from rloo_pipeline.training import faster_kernels
    from rloo_pipeline.transformers_internals.loaded_model import decoder_layers

    def trace(model: torch.nn.Module) -> None:
        for layer in decoder_layers(model):
            layer.compile(dynamic=True, backend="eager")

    monkeypatch.setattr(faster_kernels, "compile_layers", trace)
    task = gpu.Task("tiny", "cpu", "float32", 1, (8, 16), (4, 24), 4, 1)
    row = gpu.measured(task, "compiled")
    torch.compiler.reset()
    assert row["graphs"] > 0
    assert row["compilation_s"] > 0


def test_the_script_starts_without_the_libraries_of_single_sides(without) -> None:
    succeeded(subprocess.run([sys.executable, SCRIPT, "--help"], env=os.environ | without, capture_output=True))
    of_deepspeed = {"rloo_pipeline.training.engine", "rloo_pipeline.config.section"}
    modules = {*re.findall(r"from (rloo_pipeline\S+) import", SCRIPT.read_text())} - of_deepspeed
    code = f"import {', '.join(modules)}"
    succeeded(subprocess.run([sys.executable, "-c", code], env=os.environ | without, capture_output=True))


@pytest.mark.slow
@pytest.mark.long
def test_a_side_whose_library_is_missing_is_left_out_by_name(tmp_path, without) -> None:
    figures = measured(tmp_path, "--sides", "deepspeed", "trl", **without)
    assert "deepspeed" in figures["deepspeed"]["left_out"] or "pydantic" in figures["deepspeed"]["left_out"]
    assert "no module trl" in figures["trl"]["left_out"]
