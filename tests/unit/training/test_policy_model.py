"""Weights that lack a tensor, have one too many or one of another shape are refused by name by every loader, and so are
layers of an adapter that are not there. Generation defaults go from policy to policy.
"""

import errno
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import model_folders
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Lora
from rloo_pipeline.errors import UserError, explain
from rloo_pipeline.rollout import swap_check
from rloo_pipeline.training import forward_only, plain_model, policy_model, weight_files
from rloo_pipeline.training.deepspeed_internals import split_model
from rloo_pipeline.training.kernels import lm_head
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences

TENSOR = "model.layers.0.mlp.up_proj.weight"
ADAPTER_TENSOR = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
LOADERS = {
    "the trainer": lambda folder: policy_model.load(Policy(folder), "float32"),
    "checks, reference and distance": lambda folder: forward_only.load(Policy(folder), "float32"),
    "the sampler and an unchanged policy 0": lambda folder: plain_model.check_tensors(Policy(folder)),
    "the check after a swap": lambda folder: swap_check.transformers_logps(Policy(folder), "float32", [[4, 5]]),
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
    return {"missing": f"{name} is missing", "unexpected": f"{name} is not a tensor"}.get(
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
    model = policy_model.load(Policy(tiny_model), "float32")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear")).save_pretrained(folder)
    forward_only.load(Policy(folder), "float32")
    message = change(folder / "adapter_model.safetensors", damage, ADAPTER_TENSOR)
    with pytest.raises(UserError, match=f"{folder}: .*{message}"):
        forward_only.load(Policy(folder), "float32")


def test_without_the_tensor_that_another_is_tied_to_both_are_missing(tmp_path, tiny_model) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights, "it is tied"
    change(folder / "model.safetensors", "missing", "model.embed_tokens.weight")
    with pytest.raises(UserError, match=r"lm_head.weight is missing \(and 1 more"):
        policy_model.load(Policy(folder), "float32")


def test_a_tied_weight_that_is_stored_with_other_values_is_refused(tmp_path, tiny_model) -> None:
    """transformers would use it, and vLLM would not."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for value, refused in ((0.0, False), (1.0, True)):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        if not refused:
            policy_model.load(Policy(folder), "float32")
            continue
        with pytest.raises(UserError, match=r"lm_head.weight is not equal"):
            policy_model.load(Policy(folder), "float32")


def test_nothing_makes_room_for_gradients_of_a_model_that_only_scores(tiny_model, monkeypatch) -> None:
    """A loss would hold a gradient of the vocabulary in float32."""
    monkeypatch.delattr(lm_head.Projection, "loss")
    model = TokenLogProbs(forward_only.load(Policy(tiny_model), "float32"), 1.0)
    scored = forward_only.score(model, Sequences([[4, 5]], [[6, 7, 2]]), 64, "log-probs", entropies=True)
    assert len(scored.entropies[0]) == 3


SAMPLING = {"temperature": 0.6, "top_p": 0.9, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("file", "defaults", "valid"),
    [
        ("generation_config.json", {**SAMPLING, "do_sample": True}, True),
        ("generation_config.json", SAMPLING, False),
        ("generation_config.json", {"pad_token_id": -1}, False),
        ("config.json", SAMPLING, False),
    ],
)
def test_a_policy_has_the_generation_defaults_that_its_model_came_with(
    tmp_path, tiny_model, file, defaults, valid
) -> None:
    """transformers writes only what it finds valid, and reads more."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "generation_config.json").unlink()
    before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(before | defaults))
    model = policy_model.load(Policy(folder), "float32")
    policy = tmp_path / "policy"
    policy.mkdir()
    policy_model.save_beside(model, policy, Policy(folder))
    weight_files.write_together(model, policy)
    assert defaults.items() <= json.loads((policy / "generation_config.json").read_text()).items()
    assert file == "config.json" or (policy / file).read_bytes() == (folder / file).read_bytes()
    again = policy_model.load(Policy(policy), "float32")
    assert again.generation_config.to_dict() == model.generation_config.to_dict()
    if valid:
        model.save_pretrained(tmp_path / "plain")
        (tmp_path / "plain" / file).unlink()
        for written in (tmp_path / "plain").iterdir():
            assert written.read_bytes() == (policy / written.name).read_bytes(), written.name
    else:
        model.generation_config.max_length = 7  # newer releases let pass what is as it was read
        with pytest.raises(ValueError, match="GenerationConfig is invalid"):
            model.save_pretrained(tmp_path / "plain")


def test_parameters_that_a_model_does_not_train_stay_so_if_ranks_share_it(tiny_model, monkeypatch) -> None:
    without = plain_model.without_weights

    def frozen(*arguments) -> torch.nn.Module:
        model = without(*arguments)
        model.get_parameter(TENSOR).requires_grad = False
        return model

    monkeypatch.setattr(plain_model, "without_weights", frozen)
    split = SimpleNamespace(Init=lambda module, **_: list(module.parameters()))
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=split))
    model, parameters = plain_model.load_one_by_one(Policy(tiny_model), "float32")
    split_model.split_each(parameters, {})
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == [TENSOR]
    assert torch.equal(model.get_parameter(TENSOR), load_file(tiny_model / "model.safetensors")[TENSOR])


@pytest.mark.parametrize("loader", [*LOADERS, "ranks that share the model"])
def test_a_tensor_that_is_not_equal_to_the_one_it_is_tied_to_is_refused(tmp_path, tiny_model, loader) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load = LOADERS.get(loader, lambda folder: plain_model.load_one_by_one(Policy(folder), "float32"))
    with pytest.raises(UserError, match=r"not equal to the tensor that config\.json ties it to"):
        load(folder)


@pytest.mark.parametrize("ends", [[2, 7], None])
def test_what_ends_a_completion_is_the_same_for_every_policy(tmp_path, tiny_model, ends) -> None:
    """Whatever config.json says: a model that ranks share has not read generation_config.json."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"eos_token_id": [2, 9]}))
    (folder / "generation_config.json").unlink()
    if ends:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    model = plain_model.without_weights(Policy(folder))
    (policy := tmp_path / "policy").mkdir()
    policy_model.save_beside(model, policy, Policy(folder))
    assert Policy(policy).stop_ids == Policy(folder).stop_ids == (ends or [2])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["q_proj", "v_poj"], "no layer 'v_poj'; did you mean 'v_proj'?; there are down_proj, embed_tokens, "),
        (["self_attn"], "no layer 'self_attn'"),
        (["proj"], "no layer 'proj'"),
    ],
)
def test_an_adapter_on_a_layer_that_is_not_there_is_refused_by_name(tiny_model, names, message) -> None:
    with pytest.raises(UserError) as error:
        policy_model.check_layers(Policy(tiny_model), Lora(target_modules=names))
    assert str(error.value).startswith(f"update.lora.target_modules: the model has {message}")


def test_a_pattern_that_no_layer_matches_is_refused(tiny_model) -> None:
    with pytest.raises(UserError, match=r"target_modules: PEFT cannot make an adapter for .*_poj \("):
        policy_model.check_layers(Policy(tiny_model), Lora(target_modules=".*_poj"))


@pytest.mark.parametrize(
    "names", ["all-linear", ["q_proj", "v_proj"], ["layers.1.mlp.up_proj", "lm_head"], r".*\.[qv]_proj"]
)
def test_an_adapter_on_layers_that_are_there_is_taken(tiny_model, names) -> None:
    policy_model.check_layers(Policy(tiny_model), Lora(target_modules=names))
    policy_model.check_layers(Policy(tiny_model), None)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl"])
def test_only_the_language_model_of_a_model_of_images_gets_an_adapter(tmp_path, kind) -> None:
    AutoConfig.for_model(kind, text_config={"num_hidden_layers": 1}).save_pretrained(tmp_path)
    model = plain_model.without_weights(Policy(tmp_path))
    adapted = policy_model._with_adapter(model, Lora(), low_cpu_mem_usage=True)
    names = adapted.targeted_module_names
    assert {name.rpartition(".")[2] for name in names} >= {"q_proj", "down_proj"}
    assert all(name.startswith("model.language_model.") for name in names)


@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_next"])
def test_zero_3_is_refused_for_layers_that_read_the_weights_of_a_convolution(tmp_path, kind) -> None:
    """The forward or the backward pass would fail, since ZeRO 3 gathers the weights of modules that are called."""
    model = Policy(model_folders.build(tmp_path / "model", 0, kind))
    policy_model.check_layers(model, None, zero_stage=2)
    loaded = plain_model.load_plain(model, "float32", device_map="meta")
    for check in (
        lambda: policy_model.check_layers(model, None, zero_stage=3),
        lambda: plain_model.check_gathered(loaded, model),
    ):
        with pytest.raises(UserError, match=r"zero_stage: 3 cannot be used with .*; set 2 or less"):
            check()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left"), FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")],
)
def test_a_full_disk_is_not_told_as_a_fault_of_the_model(error, tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(plain_model, "auto_class", mock.Mock(side_effect=error))
    with pytest.raises(OSError, match="No ") as raised:
        plain_model.from_pretrained(Policy(tiny_model), "float32")
    assert "no space left" in explain(raised.value)


def test_a_failed_file_system_is_not_told_as_a_fault_of_the_model(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(plain_model, "auto_class", mock.Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(UserError, match=f"^{tiny_model}: the file system failed"):
        plain_model.from_pretrained(Policy(tiny_model), "float32")
