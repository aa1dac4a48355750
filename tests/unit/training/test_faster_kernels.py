"""A kernel for GPUs is used where it computes what plain transformers compute; on a CPU another device stands in."""

import sys
from copy import copy
from types import MethodType, ModuleType, SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

from rloo_pipeline.runtime import devices
from rloo_pipeline.training import faster_kernels, self_check
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.self_check import small

CONFIG = Qwen3Config(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, head_dim=32)
USUAL = modeling_qwen3.apply_rotary_pos_emb, modeling_qwen3.Qwen3MLP


PRECISION = list[bool]()
"""One entry for each call of `right`: True if convolutions could compute in TF32."""


def right(model) -> None:
    model.rightly = True
    PRECISION.append(torch.backends.cudnn.allow_tf32)


def wrong(model) -> None:
    for module in model.modules():
        if isinstance(module, modeling_qwen3.Qwen3MLP):
            module.forward = lambda x, usual=module.forward: 1.01 * usual(x)


def broken(model) -> None:
    raise RuntimeError("this card has no such instruction")


def test_a_kernel_that_fails_its_check_is_left_out_with_a_word(monkeypatch) -> None:
    monkeypatch.setattr(devices, "device_type", lambda: "cpu:0")
    monkeypatch.setattr(faster_kernels, "KERNELS", {"the right": right, "the wrong": wrong, "the broken": broken})
    monkeypatch.setattr(faster_kernels, "_problems", {})
    lines = list[str]()
    monkeypatch.setattr(faster_kernels, "say", lines.append)
    checked = self_check.run(CONFIG, False)._replace(digest="of a test")
    model = small.build(small.shrink(CONFIG, small.Shrink.HEADS), False, "eager")
    policy = SimpleNamespace(transformers_config=CONFIG, trust_remote_code=False)
    for _ in range(2):
        faster_kernels.install(model, policy, checked)
    assert model.rightly
    assert PRECISION == [False, True, True], "the check is in float32, a run in what it has"
    assert all("forward" not in vars(module) for module in model.modules())
    assert len(lines) == 2, "once per kernel"
    assert "trains without the wrong (" in lines[0]
    assert "log-probs differ" in lines[0]
    assert "this card has no such instruction" in lines[1]


FAILS = 3
"""Layers of a model for which Liger fails when it has replaced something."""


def on_a_gpu(self, hidden: torch.Tensor) -> str:
    """Liger's norm, as Triton runs it."""
    if hidden.device.type == "cpu":
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
    return "by Liger"


@pytest.fixture
def liger(monkeypatch):
    """Liger, as far as it is called: it replaces a class and a function of transformers."""

    def apply(model, **parts) -> None:
        assert parts["cross_entropy"] is False
        assert "swiglu" not in parts, "which this type has, without experts"
        modeling_qwen3.Qwen3MLP = None
        modeling_qwen3.apply_rotary_pos_emb = lambda query, *_: "by Liger"
        for module in model.modules():
            if isinstance(module, modeling_qwen3.Qwen3RMSNorm):
                module.forward = MethodType(on_a_gpu, module)
        if model.config.num_hidden_layers == FAILS:
            raise TypeError("another vision tower")

    patch = SimpleNamespace(_apply_liger_kernel_to_instance=apply)
    modules = {
        "liger_kernel": ModuleType("liger_kernel"),
        "liger_kernel.backends": SimpleNamespace(set_impl=lambda _: None),
        "liger_kernel.transformers": SimpleNamespace(monkey_patch=patch),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(faster_kernels.guard, "require", {"liger-kernel": None}.__getitem__)
    yield
    assert (modeling_qwen3.apply_rotary_pos_emb, modeling_qwen3.Qwen3MLP) == USUAL


def test_liger_changes_nothing_for_small_models_on_the_cpu(liger) -> None:
    model = small.build(small.shrink(CONFIG, small.Shrink.HEADS), False, "eager")
    for _ in range(2):
        faster_kernels.liger(model)
    assert modeling_qwen3.Qwen3MLP is USUAL[1]
    assert modeling_qwen3.apply_rotary_pos_emb(torch.empty(1, device="meta")) == "by Liger"
    heads = torch.ones(1, 2, 3, 4)
    turned = modeling_qwen3.apply_rotary_pos_emb(heads, heads, heads[:, 0], heads[:, 0])
    assert torch.equal(turned[0], USUAL[0](heads, heads, heads[:, 0], heads[:, 0])[0])

    def fail_later(model) -> None:
        faster_kernels.liger(model)
        raise RuntimeError("too late")

    checked = self_check.SelfCheck("Qwen3ForCausalLM", 0.0, 0.0, "", "of a test")
    assert "too late" in faster_kernels.problem(fail_later, CONFIG, False, checked, "cpu")


def test_a_model_with_liger_computes_on_the_cpu_where_an_engine_makes_it(liger) -> None:
    model, plain = (small.build(small.shrink(CONFIG, small.Shrink.HEADS), False, "eager") for _ in range(2))
    for _ in range(2):
        faster_kernels.liger(model)
    assert TokenLogProbs(model, 1.0).head_form is not None, "which runs the model"
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert model.model.norm(torch.empty(1, device="meta")) == "by Liger"
    faster_kernels._restore_rotary(vars(modeling_qwen3))


def test_where_liger_fails_halfway_transformers_is_as_before(liger) -> None:
    config = copy(CONFIG)
    config.num_hidden_layers = FAILS
    model = SimpleNamespace(config=config, modules=lambda: ())
    with pytest.raises(TypeError, match="another vision tower"):
        faster_kernels.liger(model)
    assert modeling_qwen3.Qwen3MLP is USUAL[1]

    def fail(_) -> None:
        faster_kernels.liger(model)

    checked = self_check.SelfCheck("Qwen3ForCausalLM", 0.0, 0.0, "", "of a test")
    assert "another vision tower" in faster_kernels.problem(fail, CONFIG, False, checked, "cpu")


def test_a_failed_check_takes_the_kernels_from_every_module_of_transformers(liger) -> None:
    """A model with images has its language model's rotary embeddings in another module than its own class."""
    faster_kernels.liger(SimpleNamespace(config=CONFIG, modules=lambda: ()))
    assert modeling_qwen3.apply_rotary_pos_emb is not USUAL[0]
    checked = self_check.SelfCheck("Qwen2ForCausalLM", 0.0, 0.0, "", "of a test")
    other = Qwen2Config(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    assert "no such instruction" in faster_kernels.problem(broken, other, False, checked, "cpu")
