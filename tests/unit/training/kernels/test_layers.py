"""Layers in fewer passes: the same loss and gradient as transformers' own, and whatever is different left alone."""

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
    """Weights of 1 would hide what they are multiplied into."""
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
    monkeypatch.setattr(layers, "AT_ONCE", 1)
    monkeypatch.setattr(layers, "FEWEST", 4)  # several slices, the last one shorter
    pack = packing.pack(PROMPTS, COMPLETIONS)
    model = with_uneven_norms(make())
    plain = TokenLogProbs(model, 1.0, whole=True)(pack, loss)
    plain.backward()
    wanted = gradient(model)
    assert replaced(model) == []
    ours = TokenLogProbs(model, 1.0)(pack, loss)
    ours.backward()
    found = gradient(model)
    assert len(replaced(model)) == 2
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=0)
    assert (found - wanted).norm() < 1e-6 * wanted.norm()


def test_rotary_embedding_is_transformers_and_so_is_its_gradient() -> None:
    plain = getattr(modeling_llama.apply_rotary_pos_emb, layers.PLAIN, modeling_llama.apply_rotary_pos_emb)
    query, key = torch.randn(1, 4, 7, 8, requires_grad=True), torch.randn(1, 2, 7, 8, requires_grad=True)
    cos, sin = torch.randn(1, 7, 8), torch.randn(1, 7, 8)
    weights = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 7, 8)

    def both(rotary):
        found = rotary(query, key, cos, sin)
        total = sum((one * weight).sum() for one, weight in zip(found, weights, strict=True))
        return *found, *torch.autograd.grad(total, (query, key))

    layers.install(llama())
    ours = modeling_llama.apply_rotary_pos_emb
    assert ours is not plain
    torch.testing.assert_close(both(ours)[:2], both(plain)[:2], rtol=0, atol=0)
    torch.testing.assert_close(both(ours)[2:], both(plain)[2:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours(query, key, cos, sin, 1), plain(query, key, cos, sin, 1), rtol=0, atol=0)


class OnePlusNorm(nn.Module):
    """Gemma's: its weights are what is added to 1."""

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
        return tuple(one * cos[:, None] + torch.stack([-one[..., 1::2], one[..., ::2]], -1).flatten(-2) * sin[:, None]
                     for one in (q, k))  # fmt: skip

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
    plain, base = TokenLogProbs(adapted(qwen3()), 1.0, whole=True)(pack), qwen3()
    if replaced_before:
        layers.install(base)
    ours = TokenLogProbs(adapted(base), 1.0)(pack)
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


def test_what_a_layer_gives_may_be_added_to_in_place() -> None:
    """As models with experts do that share one."""
    model = llama()
    layers.install(model)
    hidden = torch.randn(1, 5, 32, requires_grad=True)
    out = model.model.layers[0].mlp(hidden)
    out.add_(1.0)
    out.sum().backward()
    assert hidden.grad is not None
