"""Weights that lack a tensor, have one too many or one of another shape are refused by name by every loader."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import swap_check
from rloo_pipeline.training import forward_only, plain_model, policy_model

TENSOR = "model.layers.0.mlp.up_proj.weight"
ADAPTER_TENSOR = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
LOADERS = {
    "the trainer": lambda folder: policy_model.load(folder, "float32", False),
    "checks, reference and distance": lambda folder: forward_only.load(folder, "float32", False),
    "the sampler and an unchanged policy 0": lambda folder: plain_model.check_tensors(folder, False),
    "the check after a swap": lambda folder: swap_check.transformers_logps(folder, "float32", False, [[4, 5]]),
}


def change(file: Path, damage: str, name: str) -> str:
    """Changes a tensor of a safetensors file. Returns what the refusal must say of it."""
    weights = load_file(file)
    if damage == "missing":
        del weights[name]
    elif damage == "unexpected":
        name += ".other"
        weights[name] = torch.zeros(2)
    else:
        weights[name] = torch.zeros(3, 5)
    save_file(weights, file, metadata={"format": "pt"})
    return {"missing": f"{name} is missing", "unexpected": f"{name} is no tensor"}.get(
        damage, rf"{name} has shape \[3, 5\]"
    )


@pytest.mark.parametrize("damage", ["missing", "unexpected", "of another shape"])
@pytest.mark.parametrize("loader", LOADERS)
def test_other_tensors_than_the_models_are_refused_by_name(tmp_path, tiny_model, loader, damage) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    LOADERS[loader](folder)
    message = change(folder / "model.safetensors", damage, TENSOR)
    with pytest.raises(UserError, match=f"{folder}: .*{message}"):
        LOADERS[loader](folder)


@pytest.mark.parametrize("damage", ["missing", "unexpected", "of another shape"])
def test_other_tensors_than_the_adapters_are_refused_by_name(tmp_path, tiny_model, damage) -> None:
    import peft

    folder = tmp_path / "adapter"
    model = policy_model.load(tiny_model, "float32", False)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear")).save_pretrained(folder)
    forward_only.load(folder, "float32", False)
    message = change(folder / "adapter_model.safetensors", damage, ADAPTER_TENSOR)
    with pytest.raises(UserError, match=f"{folder}: .*{message}"):
        forward_only.load(folder, "float32", False)


def test_without_the_tensor_that_another_is_tied_to_both_are_missing(tmp_path, tiny_model) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights, "it is tied"
    change(folder / "model.safetensors", "missing", "model.embed_tokens.weight")
    with pytest.raises(UserError, match=r"lm_head.weight is missing \(and 1 more"):
        policy_model.load(folder, "float32", False)


def test_a_tied_weight_that_is_stored_with_other_values_is_refused(tmp_path, tiny_model) -> None:
    """transformers would use it, and vLLM would not."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for value, refused in ((0.0, False), (1.0, True)):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        if not refused:
            policy_model.load(folder, "float32", False)
            continue
        with pytest.raises(UserError, match=r"lm_head.weight is not equal"):
            policy_model.load(folder, "float32", False)
