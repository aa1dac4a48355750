"""The model of a policy as the trainer has it: loaded from its folder, and saved into another."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.artifacts.policy import INDEX, PICKLES, WEIGHTS, base_of, check
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import import_shims
from rloo_pipeline.training import self_check
from rloo_pipeline.training.self_check import SelfCheck

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def load(folder: Path, dtype: str, trust_remote_code: bool, disable_dropout: bool = True) -> PreTrainedModel:
    """The full model of a policy, or the base of its adapter, with packed attention.

    Args:
        folder: the policy.
        dtype: number format of its weights.
        trust_remote_code: whether code that comes with it may be run.
        disable_dropout: whether none of its own dropout is done, in training either.

    Raises:
        UserError: it is not whole, of an unknown architecture, or attends in a way that packing does not cover.
    """
    import_shims.prepare_transformers()
    import torch
    from transformers import AutoModelForCausalLM

    from rloo_pipeline.training import dropout
    from rloo_pipeline.training.kernels import attention

    base = base_of(folder)
    check(folder)
    check(base)
    found = self_check.of(base, trust_remote_code)
    attention.register()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            attn_implementation=attention.NAME,
        )
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise UserError(
            f"{base}: not a causal language model that transformers can load ({' '.join(str(error).split())[:200]})"
        ) from error
    if disable_dropout:
        dropout.remove(model)
    model.self_check = found  # type: ignore[assignment]
    return model


def save(model: PreTrainedModel, weights: Mapping[str, Tensor], beside: Path, previous: Path, alike: bool) -> None:
    """Writes weights and configuration into the folder `beside`, with tokenizer and generation files of the policy
    before.

    The `lm_head.weight` that engines clone out of tied embeddings is left out.

    Args:
        model, weights: the policy.
        beside: empty.
        previous: the policy before.
        alike: whether that was saved here, of the same model: then only weights differ, and transformers need not make
            everything else anew, which takes longer than a small model's weights.
    """
    tied = getattr(model.config, "tie_word_embeddings", False)
    kept = {name: tensor.contiguous() for name, tensor in weights.items() if not (tied and name == "lm_head.weight")}
    if alike and _lies_in_one_file(kept, previous):
        from safetensors.torch import save_file

        save_file(kept, beside / WEIGHTS, metadata={"format": "pt"})
    else:
        model.save_pretrained(beside, state_dict=kept)
    found = getattr(model, "self_check", None)
    if isinstance(found, SelfCheck):
        found.write(beside)
    copy_side_files(previous, beside)


def _lies_in_one_file(weights: Mapping[str, Tensor], folder: Path) -> bool:
    """Whether a policy has these weights under these names in one file, as transformers names and cuts them."""
    if (folder / INDEX).exists() or not (folder / WEIGHTS).exists():
        return False
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, "pt") as file:
        return set(file.keys()) == weights.keys()


def copy_side_files(source: Path, target: Path) -> None:
    """Copies what belongs to a policy beside its weights: tokenizer, chat template, generation defaults, remote
    code.
    """
    for file in sorted(source.iterdir()):
        heavy = file.suffix in {".safetensors", ".gguf", ".h5", ".msgpack", *PICKLES} or file.name == INDEX
        if file.is_file() and not heavy and not file.name.startswith(".") and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
