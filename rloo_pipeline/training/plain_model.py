"""Loads a model as transformers and PEFT do, and refuses weights that are not exactly its tensors.

It does not import packed training, so that editing that code does not make a run sample again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts import model_files, vision
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError, one_line, raise_disk_error
from rloo_pipeline.runtime import devices, ranks
from rloo_pipeline.transformers_internals import loaded_model, optional_parts

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


def load_plain(policy: Policy, dtype: str, **options: Any) -> PreTrainedModel:
    """Loads the full model of a policy, or the base of its adapter, with transformers.

    Raises:
        UserError: a file is missing or truncated, transformers cannot load it, or its weights are not exactly the
            tensors of the model.
    """
    files = policy.weights  # checks that they are complete
    model: PreTrainedModel
    model, loading_info = from_pretrained(policy, dtype, **options)
    model_files.check_loading_info(policy.base, loading_info)
    if untied := _untied(model, StoredTensors(files)):  # transformers would use both, vLLM would not
        raise UserError(
            f"{policy.base}: {untied[0]} is not equal to the tensor that config.json ties it to; set "
            "tie_word_embeddings: false there"
        )
    return model


def _untied(model: PreTrainedModel, stored: StoredTensors) -> list[str]:
    """Names of tensors that should be tied to others but differ from them in the files.

    transformers finds them while it loads weights, so the files are compared for a model that has none.
    """
    import torch

    if model.device.type != "meta":
        return loaded_model.untied_weights(model)
    tied = loaded_model.tied_weights(model).items()
    twice = [(name, source) for name, source in tied if stored.files.keys() >= {name, source}]
    return [name for name, source in twice if not torch.equal(stored.read(name), stored.read(source))]


def without_weights(policy: Policy, dtype: str = "float32", **options: object) -> PreTrainedModel:
    """A full model whose buffers and tied parameters are set up, but whose parameters have no values."""
    import torch
    from accelerate import init_empty_weights

    config, trusted = deepcopy(policy.transformers_config), policy.trust_remote_code
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = auto_class(policy.config).from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=trusted, **options
        )
    model.tie_weights()
    return model


def load_nf4(policy: Policy, dtype: str, **options: object) -> PreTrainedModel:
    """Loads a full model with its linear layers in NF4, except the output layer or the layers that its record names.

    Raises:
        UserError: see `load_plain`; or the model has no linear layer that can be quantized.
    """
    import torch
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=getattr(torch, dtype),
        bnb_4bit_use_double_quant=False,
        llm_int8_skip_modules=policy.layers_in_16_bits,
    )
    model = load_plain(policy, dtype, quantization_config=config, **options)
    layers = [layer for _, layer in layers_in_nf4(model)]
    if not layers:
        raise UserError(f"{policy.base}: none of its layers can be held in 4 bits; remove model.quantization")
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False  # that kernel rounds differently from those of other CPUs
    return model


def layers_in_nf4(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that are held in 4 bits, with their names."""
    from bitsandbytes.nn.modules import Linear4bit

    yield from ((name, layer) for name, layer in model.named_modules() if isinstance(layer, Linear4bit))


def load_one_by_one(
    policy: Policy, dtype: str, **options: object
) -> tuple[PreTrainedModel, Iterator[nn.Parameter]] | None:
    """A full model for ranks that share it (ZeRO 3), and its parameters, which are read one at a time as the iterator
    reaches them; only the first rank reads, the others get empty ones.

    Args:
        policy: the model, or an adapter on it.
        dtype: number format of the weights.
        options: further arguments of `from_pretrained`.

    Returns:
        The two; None if transformers renames or joins tensors of the file (such as experts), which takes all at once.

    Raises:
        UserError: the stored tensors are not exactly those of the model, or as `check_gathered`.
    """
    import torch
    from torch import nn

    shapes: Any = check_tensors(policy)
    if loaded_model.renames_weights(shapes):
        return None
    check_gathered(shapes, policy)
    model: Any = without_weights(policy, dtype, **options)
    stored, names = StoredTensors(policy.weights), dict[nn.Parameter, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):  # a tied one has several names
        names.setdefault(parameter, []).append(name)
    in_file = {parameter: name for parameter, each in names.items() for name in each if name in stored.files}
    if in_file.keys() != names.keys():
        return None
    device = torch.device(devices.device_type())

    def filled() -> Iterator[nn.Parameter]:
        for old, name in in_file.items():
            empty = torch.empty(old.shape, dtype=old.dtype, device=device)
            if ranks.current().first:
                empty.copy_(stored.read(name))
            weights = nn.Parameter(empty, requires_grad=old.requires_grad)
            for each in names[old]:
                _replace_tensor(model, each, weights)
            yield weights

    for name, buffer in dict(model.named_buffers()).items():
        value = stored.read(name).to(buffer.dtype) if name in stored.files else buffer
        _replace_tensor(model, name, value.to(device))
    return model.eval(), filled()


def _replace_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Replaces a parameter or a buffer."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, value)


def check_gathered(model: nn.Module, policy: Policy) -> None:
    """Checks that the hooks of modules, by which ZeRO 3 gathers weights, run before the weights are used.

    Raises:
        UserError: there is a Mamba or DeltaNet layer, which reads the weights of its convolution without calling it.
    """
    from torch import nn

    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise UserError(
            f"deepspeed.zero_stage: 3 cannot be used with {policy}, whose convolutions would compute without their "
            "weights; set 2 or less"
        )


def from_pretrained(
    policy: Policy, dtype: str, kind: Any = None, advice: str = "use another model", **options: object
) -> Any:
    """Loads a model and the problems that transformers has found with its tensors, which it does not check.

    Args:
        policy: the model.
        dtype: number format of the weights.
        kind: class of transformers; None for that of a causal language model.
        advice: what to do if transformers cannot load it.
        options: further arguments of transformers' `from_pretrained`.

    Raises:
        UserError: transformers cannot load it.
    """
    optional_parts.prepare_transformers()
    import torch

    options |= {"trust_remote_code": policy.trust_remote_code, "use_safetensors": True, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # the problems list them by name
    try:
        kind = kind or auto_class(policy.config)
        return kind.from_pretrained(policy.base, dtype=getattr(torch, dtype), **options)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise_disk_error(error, policy.base)
        raise UserError(f"{policy.base}: transformers cannot load it ({one_line(error)}); {advice}") from error


def auto_class(hf_config: Mapping[str, Any]) -> Any:
    """The transformers class that loads the model of a config.json."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if vision.takes_images(hf_config) else AutoModelForCausalLM


def check_tensors(policy: Policy) -> PreTrainedModel:
    """Checks the names and shapes of a policy's tensors without reading them; returns the full model without values.

    Raises:
        UserError: see `load_plain`.
    """
    return load_plain(policy, "float32", device_map="meta")


def load_adapter(model: PreTrainedModel, policy: Policy, trainable: bool = False) -> Any:
    """Loads the adapter of a policy onto its base model.

    Raises:
        UserError: PEFT cannot load it, or its weights are not exactly the tensors of the adapter.
    """
    import peft

    Policy(policy.base).verify()
    options: dict[str, Any] = {"autocast_adapter_dtype": False, "ignore_mismatched_sizes": True}
    try:
        adapted = peft.PeftModel.from_pretrained(model, policy.folder, is_trainable=trainable, **options)
    except (ValueError, OSError, KeyError, RuntimeError, TypeError) as error:
        raise_disk_error(error, policy.folder)
        raise UserError(f"{policy}: not an adapter that PEFT can load ({one_line(error)})") from error
    weights = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    expected = {name: list(tensor.shape) for name, tensor in weights.items()}
    stored = StoredTensors([policy.folder / model_files.ADAPTER_WEIGHTS]).shapes
    shapes = {name: shape for name, shape in stored.items() if ".base_layer." not in name}  # PEFT may write them, too
    common = sorted(shapes.keys() & expected.keys())
    loading_info = {
        "missing_keys": expected.keys() - shapes.keys(),
        "unexpected_keys": shapes.keys() - expected.keys(),
        "mismatched_keys": [(name, shapes[name], expected[name]) for name in common if shapes[name] != expected[name]],
    }
    model_files.check_loading_info(policy.folder, loading_info)
    return adapted


def remove_dropout(model: nn.Module) -> None:
    """Sets every dropout rate to 0: of dropout layers, of modules that store a rate, and of expert routers' jitter.

    Dropout that is active in the optimizer step but not when π_old is computed makes the ratio compare different
    policies.
    """
    from torch import nn

    layers = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    for module in model.modules():
        if isinstance(module, layers):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("drop" in name.lower() or "jitter" in name.lower()) and type(value) is float:
                setattr(module, name, 0.0)


def recompute_layers(model: Any) -> None:
    """Makes a model store only the inputs of its layers, and compute the rest again in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()


class StoredTensors:
    """The tensors in safetensors files, each read on request.

    Attributes:
        files: file of each tensor, by the tensor's name.
        shapes: shape of each tensor, by its name.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        """Reads the names and shapes of the tensors."""
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}
        for file in files:
            for name, entry in model_files.tensors_in(file).items():
                self.files[name], self.shapes[name] = file, entry["shape"]

    def read(self, name: str) -> Tensor:
        """Reads a tensor and closes its file again, since its pages count as memory of this process."""
        from safetensors import safe_open

        with safe_open(self.files[name], "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor
