"""What an engine writes of a policy that is an adapter."""

import pytest
import torch
from safetensors.torch import load_file
from trainers import trainer_settings

from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Deepspeed, Lora
from rloo_pipeline.training import policy_model
from rloo_pipeline.training.engine import Engine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines")]


@pytest.mark.parametrize("names", ["all-linear", ["q_proj", "lm_head"], ["embed_tokens"]])
def test_the_frozen_base_stays_where_it_is_when_an_adapter_is_written(tmp_path, tiny_model, monkeypatch, names) -> None:
    settings = trainer_settings(lora=Lora(r=2, target_modules=names))
    engine = Engine(Policy(tiny_model), settings, 0)
    copied, cpu = list[int](), torch.Tensor.cpu

    def counted(tensor: torch.Tensor, *words, **named) -> torch.Tensor:
        copied.append(tensor.numel())
        return cpu(tensor, *words, **named)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    engine.save_policy(tmp_path / "policy")
    monkeypatch.undo()
    assert sum(copied) == 0
    assert not (tmp_path / "policy" / "README.md").exists(), "PEFT writes an empty form for a model card"
    assert all(".lora_" in name for name in load_file(tmp_path / "policy" / "adapter_model.safetensors")), "no base"
    targets = read_json(tmp_path / "policy" / "adapter_config.json")["target_modules"]
    assert targets == sorted(targets), "in any process"
    again = policy_model.load_trainable(Policy(tmp_path / "policy"), settings)
    loaded = dict(again.named_parameters())
    for name, weight in engine.model.named_parameters():
        torch.testing.assert_close(loaded[name], weight.cpu(), rtol=0, atol=0)


def test_an_adapter_on_an_embedding_that_is_written_under_zero_3_can_be_loaded(tmp_path, tiny_model) -> None:
    """Its base is split over the ranks, and no part of the policy."""
    settings = trainer_settings(lora=Lora(r=2, target_modules=["embed_tokens"]))
    engine = Engine(Policy(tiny_model), settings._replace(deepspeed=Deepspeed(zero_stage=3)), 0)
    engine.save_policy(tmp_path / "policy")
    loaded = dict(policy_model.load_trainable(Policy(tmp_path / "policy"), settings).named_parameters())
    for name, weight in engine.weights():
        torch.testing.assert_close(loaded[name], weight, rtol=0, atol=0)
