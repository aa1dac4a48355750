"""FLOPs that an update needs, and the share of a card's peak."""

import pytest
from helpers import mini

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import peak_share
from rloo_pipeline.config import Config
from rloo_pipeline.runtime import devices


def test_a_forward_pass_by_hand() -> None:
    """Two completions of 2 and 1 tokens after a prompt of 3, which they share; a group without completions is free."""
    products = 2 * 100 * (3 + 2 + 1)
    attention = 4 * 10 * ((1 + 2 + 3) + (4 + 5) + 4)
    head = 2 * 7 * (2 + 1)
    assert peak_share.forward(100, 10, 7, [3, 3, 5, 5], [2, 1, 0, 0], samples=2) == products + attention + head


def test_the_weights_are_those_of_the_layers(tiny_model, monkeypatch) -> None:
    """With one token of a prompt and one of a completion, an update needs three passes over them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    matrices = sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() == 2)
    norms = sum(weight.numel() for weight in model.model.parameters() if weight.dim() == 1)
    attention = model.config.num_hidden_layers * model.config.num_attention_heads * model.config.head_dim
    head = model.config.vocab_size * model.config.hidden_size
    config = Config(**mini(model={"dtype": "bfloat16"}, rollout={"num_generations": 2}))
    monkeypatch.setattr(devices, "card", lambda: "NVIDIA H200")
    needed = peak_share._needed(config, Policy(tiny_model), [1, 1], [1, 0])
    passes = config.algorithm.num_iterations * 3 + config.algorithm.needs_old_pass
    assert needed == passes * (2 * (matrices + norms) * 2 + 4 * attention * (1 + 2) + 2 * head)
    seconds = needed / 989e12 / 2 / 0.25
    clause = peak_share.of_update(config, Policy(tiny_model), [1, 1], [1, 0], seconds, cards=2)
    assert clause == ", 0.25 of the peak of 2 NVIDIA H200"
    on_float32 = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
    assert peak_share.of_update(on_float32, Policy(tiny_model), [1, 1], [1, 0], seconds, 2) == ""


@pytest.mark.parametrize(
    ("card", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3 1g.10gb", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA RTX A1000", None),
        ("AMD EPYC 7B13", None),
    ],
)
def test_peaks_are_known_by_the_name_of_a_whole_card(card, teraflops) -> None:
    assert peak_share.peak(card) == (teraflops and teraflops * 1e12)
