"""Models in 4 bits (NF4, Dettmers et al. 2023), as the frozen base of a LoRA adapter.

Sampler and trainer must hold the same weights. Policy 0 is therefore the model rounded to NF4, written in 16 bits: the
sampler reads it as it is, and the trainer, which quantizes it again, gets exactly these numbers. A weight is one of 16
codes c (±1 among them) times the largest magnitude m of its block of 64. In 16 bits m is exact and c·m quantizes to c
again, so rounding twice is rounding once. The scales m are not quantized themselves.

A checkpoint that is in NF4 already keeps its codes c, and its scales m are rounded to the model's number format. Its
16-bit layers stay as they are, and `Policy.layers_in_16_bits` names them for the trainer.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rloo_pipeline.artifacts import model_files
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import model_support, plain_model, weight_files
from rloo_pipeline.training.plain_model import StoredTensors
from rloo_pipeline.transformers_internals import loaded_model

BLOCK = 64
"""Number of weights that share a scale: the default of bitsandbytes, which `load_nf4` does not change."""
PARTS = ".weight."
"""Separates a layer's name from those of its scales in such a checkpoint."""


def round_to_nf4(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds a weight to the values of NF4, in the given number format."""
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")
    rounded: Tensor = functional.dequantize_4bit(packed, state).to(dtype)
    return rounded


def write_rounded(policy: Policy, target: Path, dtype: str) -> None:
    """Writes the weights that the trainer will hold, in the model's number format, and any other file that must differ
    from the full model's.

    Raises:
        UserError: see `plain_model.load_nf4`; or transformers renames or joins tensors of the file.
    """
    write = _write_checkpoint if model_support.comes_in_nf4(policy.config) else _write_full
    write(policy, target, dtype)


def _write_full(policy: Policy, target: Path, dtype: str) -> None:
    """Writes the weights of a model that is not quantized yet."""
    model: Any = plain_model.load_nf4(policy, dtype)
    if loaded_model.renames_weights(model):
        raise UserError(
            f"{policy}: transformers renames or joins tensors of this model, so its 4-bit form cannot be written under "
            "their names; remove model.quantization"
        )
    in_4_bits = {f"{name}.weight" for name, _ in plain_model.layers_in_nf4(model)}
    stored = StoredTensors(policy.weights)
    missing = in_4_bits - stored.files.keys()
    if missing:
        raise UserError(f"{policy}: no tensor has the name of its layer {min(missing)}; remove model.quantization")
    weight_files.write_shards(_rounded(stored, in_4_bits, getattr(torch, dtype)), target)


def _write_checkpoint(policy: Policy, target: Path, dtype: str) -> None:
    """Writes the weights of a checkpoint in NF4, its config.json without quantization, and the record."""
    stored = StoredTensors(policy.weights)
    in_4_bits = {name.partition(PARTS)[0] + ".weight" for name in stored.files if PARTS in name}
    weight_files.write_shards(_rounded(stored, in_4_bits, getattr(torch, dtype)), target)
    kept = {key: value for key, value in policy.config.items() if key != "quantization_config"}
    write_json(target / "config.json", kept)
    model: Any = plain_model.load_plain(Policy(target, policy.trust_remote_code), dtype, device_map="meta")
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    patterns = [f"{re.escape(name)}$" for name in linear if f"{name}.weight" not in in_4_bits]
    write_json(target / model_files.NF4, {"in_16_bits": patterns})


def _rounded(stored: StoredTensors, in_4_bits: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model under their names; those of 4-bit layers are rounded until nothing changes any more."""
    parts = {name: stored.read(name) for name in stored.files if PARTS in name}
    for name, file in stored.files.items():
        if name in parts:
            continue
        tensor = stored.read(name)
        if tensor.dtype == torch.uint8:
            tensor = _unpacked(tensor, {key: parts[key] for key in parts if key.startswith(f"{name}.")}, file, name)
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if name in in_4_bits:
            if tensor.shape[-1] % BLOCK:
                raise UserError(
                    f"{file}: rows of {name} have {tensor.shape[-1]} numbers, not a multiple of {BLOCK}, which "
                    "bitsandbytes computes wrongly on CPUs; remove model.quantization"
                )
            tensor = round_to_nf4(tensor, dtype)
            if not torch.equal(tensor, round_to_nf4(tensor, dtype)):
                raise UserError(f"{file}: {name} cannot be held in NF4 and {dtype}; remove model.quantization")
        yield name, tensor


def _unpacked(packed: Tensor, parts: Mapping[str, Tensor], file: Path, name: str) -> Tensor:
    """Unpacks a weight of a checkpoint in NF4 to float32."""
    from bitsandbytes import functional

    state = functional.QuantState.from_dict(dict(parts), torch.device("cpu"))
    if state.quant_type != "nf4" or state.blocksize != BLOCK:
        raise UserError(
            f"{file}: {name} is in {state.quant_type} in blocks of {state.blocksize}; only NF4 in blocks of {BLOCK} "
            "can be trained, so use another checkpoint"
        )
    state.dtype = torch.float32
    unpacked: Tensor = functional.dequantize_4bit(packed, state)
    return unpacked
