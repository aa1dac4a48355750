"""What decays is what decays in transformers' Trainer, with each optimizer."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM, Trainer

from rloo_pipeline.training import optimizers
from rloo_pipeline.training.settings import LearningRate, TrainerSettings

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "LayerNorm by type, biases": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)),
    "RMSNorm by name": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8, intermediate_size=24, attention_bias=True)
    ),
}


def groups_of(model: torch.nn.Module, name: str, decay: float) -> list[dict]:
    settings = TrainerSettings("float32", LearningRate(1e-3), (0.9, 0.99), weight_decay=decay, optimizer=name)
    return optimizers.build(model, settings).param_groups


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "muon"])
def test_biases_and_norms_do_not_decay(kind, name) -> None:
    model = MODELS[kind]()
    decaying = set(Trainer.get_decay_parameter_names(None, model)) & {key for key, _ in model.named_parameters()}
    assert 0 < len(decaying) < len(list(model.parameters()))
    decay = {
        id(value): group.get("weight_decay", 0.1) for group in groups_of(model, name, 0.1) for value in group["params"]
    }
    assert {key for key, value in model.named_parameters() if decay[id(value)]} == decaying
    assert set(decay.values()) == {0.0, 0.1}


def test_without_decay_there_is_one_group() -> None:
    assert len(groups_of(MODELS["RMSNorm by name"](), "adamw", 0.0)) == 1
