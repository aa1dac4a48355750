"""Layer kernels: loss and gradient equal those of transformers, and other layers are left alone."""

import pytest
import torch
from models import SIZES, gradient, qwen3
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from rloo_pipeline.training import packing
from rloo_pipeline.training.kernels import attention, layers
from rloo_pipeline.training.logprobs import TokenLogProbs

PROMPTS = [[3, 4, 5], [3, 4, 5], [9, 8, 7, 6, 5]]
COMPLETIONS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10]]


def llama() -> LlamaForCausalLM:
    attention.register()
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def with_uneven_norms(model: nn.Module) -> nn.Module:
    """Norms with weights other than 1, which would hide a missing product."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def loss(_, logps, mask, __):
    return (logps * mask * torch.linspace(0.5, 1.5, 20)[: logps.shape[1]]).sum()


def replaced(model: nn.Module) -> list[str]:
    return sorted({type(layer).__name__ for layer in model.modules() if hasattr(layer, layers.PLAIN)})


@pytest.mark.parametrize("make", [qwen3, llama])
def test_loss_and_gradient_are_those_of_the_plain_layers(make, monkeypatch) -> None:
    monkeypatch.setattr(layers, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(layers, "MIN_TOKENS", 4)  # several slices, the last one shorter
    pack = packing.pack(PROMPTS, COMPLETIONS)
    model = with_uneven_norms(make())
    plain = TokenLogProbs(model, 1.0, plain=True)(pack, loss)
    plain.backward()
    expected = gradient(model)
    assert replaced(model) == []
    with_kernels = TokenLogProbs(model, 1.0)(pack, loss)
    with_kernels.backward()
    kernel_gradient = gradient(model)
    assert len(replaced(model)) == 2
    torch.testing.assert_close(with_kernels, plain, rtol=1e-6, atol=0)
    assert (kernel_gradient - expected).norm() < 1e-6 * expected.norm()


def test_rotary_embedding_is_transformers_and_so_is_its_gradient() -> None:
    plain = getattr(modeling_llama.apply_rotary_pos_emb, layers.PLAIN, modeling_llama.apply_rotary_pos_emb)
    query, key = torch.randn(1, 4, 7, 8, requires_grad=True), torch.randn(1, 2, 7, 8, requires_grad=True)
    cos, sin = torch.randn(1, 7, 8), torch.randn(1, 7, 8)
    weights = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 7, 8)

    def both(rotary):
        outputs = rotary(query, key, cos, sin)
        total = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
        return *outputs, *torch.autograd.grad(total, (query, key))

    layers.install(llama())
    with_kernels = modeling_llama.apply_rotary_pos_emb
    assert with_kernels is not plain
    torch.testing.assert_close(both(with_kernels)[:2], both(plain)[:2], rtol=0, atol=0)
    torch.testing.assert_close(both(with_kernels)[2:], both(plain)[2:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(with_kernels(query, key, cos, sin, 1), plain(query, key, cos, sin, 1), rtol=0, atol=0)


class OnePlusNorm(nn.Module):
    """Gemma's norm: 1 plus the weight."""

    variance_epsilon = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.25))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (1 + self.weight) * hidden * (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


class GeGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down_proj = nn.Linear(12, 8, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.gelu(self.gate_proj(hidden)) * self.up_proj(hidden))


@pytest.mark.parametrize("make", [OnePlusNorm, GeGLU, lambda: qwen3(dtype=torch.bfloat16)])
def test_other_layers_stay_as_they_are(make) -> None:
    model = nn.Sequential(make())
    layers.install(model)
    assert replaced(model) == []


def test_another_rotary_embedding_stays_as_it_is(monkeypatch) -> None:
    def interleaved(q, k, cos, sin):
        return tuple(x * cos[:, None] + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin[:, None]
                     for x in (q, k))  # fmt: skip

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
    layers.install(llama())
    assert modeling_llama.apply_rotary_pos_emb is interleaved


@pytest.mark.parametrize("replaced_before", [False, True])
def test_adapters_on_the_projections_are_not_passed_by(replaced_before) -> None:
    import peft

    def adapted(base: nn.Module) -> nn.Module:
        torch.manual_seed(2)
        return peft.get_peft_model(base, peft.LoraConfig(target_modules=["gate_proj"], init_lora_weights=False))

    pack = packing.pack(PROMPTS, COMPLETIONS)
    plain, base = TokenLogProbs(adapted(qwen3()), 1.0, plain=True)(pack), qwen3()
    if replaced_before:
        layers.install(base)
    with_kernels = TokenLogProbs(adapted(base), 1.0)(pack)
    torch.testing.assert_close(with_kernels, plain, rtol=1e-6, atol=1e-6)


def test_what_a_layer_gives_may_be_added_to_in_place() -> None:
    """As models with a shared expert do."""
    model = llama()
    layers.install(model)
    hidden = torch.randn(1, 5, 32, requires_grad=True)
    out = model.model.layers[0].mlp(hidden)
    out.add_(1.0)
    out.sum().backward()
    assert hidden.grad is not None
