"""Loads a model as transformers and PEFT do, and refuses weights that are not exactly its tensors.

It imports nothing of the packed training, so that a change there does not sample again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts import vision
from rloo_pipeline.artifacts.model_files import ADAPTER_WEIGHTS, check_loading_info
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError, one_line, raise_disk_full
from rloo_pipeline.transformers_internals import loaded_model, optional_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_plain(policy: Policy, dtype: str, **options: object) -> PreTrainedModel:
    """Loads the full model of a policy, or the base of its adapter, with transformers.

    Raises:
        UserError: a file is missing or truncated, transformers cannot load it, or its weights are not exactly the
            tensors of the model.
    """
    policy.weights  # noqa: B018, checks that they are complete
    mismatched = {"ignore_mismatched_sizes": True}  # they are in loading_info, by name
    model: PreTrainedModel
    model, loading_info = from_pretrained(policy, dtype, output_loading_info=True, **mismatched, **options)
    check_loading_info(policy.base, loading_info)
    if untied := loaded_model.untied_weights(model):  # transformers would use both, vLLM would not
        raise UserError(
            f"{policy.base}: {untied[0]} is not equal to the tensor that config.json ties it to; set "
            "tie_word_embeddings: false there"
        )
    return model


def from_pretrained(policy: Policy, dtype: str, **options: object) -> Any:
    """Loads a causal language model with transformers' function of this name; does not check its tensors.

    Raises:
        UserError: transformers cannot load it.
    """
    optional_parts.prepare_transformers()
    import torch

    try:
        return auto_class(policy.config).from_pretrained(
            policy.base,
            dtype=getattr(torch, dtype),
            trust_remote_code=policy.trust_remote_code,
            use_safetensors=True,
            **options,
        )
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise_disk_full(error)
        raise UserError(
            f"{policy.base}: not a causal language model that transformers can load ({one_line(error)})"
        ) from error


def auto_class(hf_config: Mapping[str, Any]) -> Any:
    """The class of transformers that loads the model of a config.json."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if vision.takes_images(hf_config) else AutoModelForCausalLM


def check_tensors(policy: Policy) -> None:
    """Checks the names and shapes of a policy's tensors without reading them, for a stage that does not load them here.

    Raises:
        UserError: as `load_plain`.
    """
    load_plain(policy, "float32", device_map="meta")


def load_adapter(model: PreTrainedModel, policy: Policy, trainable: bool = False) -> Any:
    """Loads the adapter of a policy onto its base model.

    Raises:
        UserError: PEFT cannot load it, or its weights are not exactly the tensors of the adapter.
    """
    import peft
    from safetensors import safe_open

    Policy(policy.base).verify()
    options: dict[str, Any] = {"autocast_adapter_dtype": False, "ignore_mismatched_sizes": True}
    try:
        adapted = peft.PeftModel.from_pretrained(model, policy.folder, is_trainable=trainable, **options)
    except (ValueError, OSError, KeyError, RuntimeError, TypeError) as error:
        raise_disk_full(error)
        raise UserError(f"{policy}: not an adapter that PEFT can load ({one_line(error)})") from error
    expected = {name: list(tensor.shape) for name, tensor in peft.get_peft_model_state_dict(adapted).items()}
    with safe_open(policy.folder / ADAPTER_WEIGHTS, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    common = sorted(shapes.keys() & expected.keys())
    loading_info = {
        "missing_keys": expected.keys() - shapes.keys(),
        "unexpected_keys": shapes.keys() - expected.keys(),
        "mismatched_keys": [(name, shapes[name], expected[name]) for name in common if shapes[name] != expected[name]],
    }
    check_loading_info(policy.folder, loading_info)
    return adapted
