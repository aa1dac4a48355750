"""Compiled layers train as uncompiled ones do, whatever lengths came before; wrong ones are refused."""

import json
import os

import model_folders
import pytest
import torch
from torch._dynamo.utils import counters
from trainers import trainer_settings

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import faster_kernels
from rloo_pipeline.training.engine import Engine
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.transformers_internals.loaded_model import decoder_layers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines")]

RATE = 1e-2
SMOOTH = {"adam_epsilon": 1.0, "max_tokens_per_micro_batch": 500}
"""Steps are in proportion to small gradients, whose signs would decide otherwise."""
BATCHES = [
    Sequences([[4 + row % 7, 5, 6 + length % 5] for row in range(3)], [[7 + n % 9 for n in range(length)]] * 3)
    for length in (2, 61, 7, 150)
]


@pytest.fixture
def compiling(monkeypatch, tmp_path):
    monkeypatch.setattr(faster_kernels, "_problems", {})
    monkeypatch.setenv(faster_kernels.CACHE, os.environ.get(faster_kernels.CACHE, ""))
    monkeypatch.delenv(faster_kernels.CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def trained(engine: Engine, before: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs before two steps, and the weights after them; first come some passes over other lengths."""
    for batch in BATCHES[2 : 2 + before]:
        engine.logps(batch)
    logps = engine.logps(BATCHES[0])
    for batch in BATCHES[:2]:
        engine.step(batch, range(3), lambda _, logps, mask, __: -(logps * mask).sum())
    return logps, {name: values.clone() for name, values in engine.weights()}


def test_compiled_layers_take_the_steps_of_uncompiled_ones_after_any_lengths(tmp_path, tiny_model, compiling) -> None:
    usual = Engine(Policy(tiny_model), trainer_settings(RATE, **SMOOTH), 0)
    assert not any(layer._compiled_call_impl for layer in decoder_layers(usual.model)), "off by default"
    logps, weights = trained(usual)
    kept = Engine(Policy(tiny_model), trainer_settings(RATE, **SMOOTH, torch_compile=True), 0)
    assert all(layer._compiled_call_impl for layer in decoder_layers(kept.model))
    graphs = counters["stats"]["unique_graphs"]
    compiled_logps, compiled = trained(kept)
    assert counters["stats"]["unique_graphs"] == graphs > 0, "one compilation for all lengths"
    assert torch.allclose(compiled_logps, logps, rtol=1e-6, atol=1e-6)
    assert compiled.keys() == weights.keys(), "names stay"
    for name, values in compiled.items():
        assert torch.allclose(values, weights[name], rtol=0, atol=1e-5 * RATE), name
    [folder] = (tmp_path / "cache" / "torchinductor").iterdir()
    whole, half = sorted(str(entry.relative_to(folder)) for entry in folder.rglob("*")), folder / "half.so"
    half.touch()  # as a stage leaves it that was killed while a compiler wrote
    (folder / ".rloo-complete").rename(folder / ".rloo-before")
    (folder / ".rloo-before").write_text(json.dumps(whole))
    torch.compiler.reset()
    new = Engine(Policy(tiny_model), trainer_settings(RATE, **SMOOTH, torch_compile=True), 0)
    _, again = trained(new, before=2)
    assert all(torch.equal(values, compiled[name]) for name, values in again.items()), "a new process, other lengths"
    assert [*folder.rglob("*.so")], "compiled code is in the cache folder"
    assert not half.exists()


def test_layers_that_compile_wrongly_are_refused(tiny_model, compiling, monkeypatch) -> None:
    def wrong(model) -> None:
        for layer in decoder_layers(model):
            layer.mlp.forward = lambda x, usual=layer.mlp.forward: 1.01 * usual(x)

    monkeypatch.setattr(faster_kernels, "compile_layers", wrong)
    with pytest.raises(UserError, match=r"update.torch_compile: .* log-probs differ .*; remove the key"):
        Engine(Policy(tiny_model), trainer_settings(torch_compile=True), 0)


def test_a_model_whose_layers_choose_experts_is_refused(tmp_path, compiling) -> None:
    model = model_folders.build(tmp_path / "model", 0, "qwen3_moe")
    with pytest.raises(UserError, match=r"update.torch_compile: .* mixture of experts"):
        Engine(Policy(model), trainer_settings(torch_compile=True), 0)
