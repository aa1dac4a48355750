"""Models that are split over the ranks from the start (ZeRO 3), so that no process ever holds all weights.

DeepSpeed's `zero.Init` splits each tensor as it is made, and transformers fills it from the file. Weights are put
together one module at a time to compute, and one tensor at a time to be written. All ranks write at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.artifacts.model_files import INDEX, WEIGHTS
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import JSON
from rloo_pipeline.errors import UserError, translate_disk_full
from rloo_pipeline.runtime import devices, import_shims, ranks
from rloo_pipeline.training import deepspeed_config, plain_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD = 500_000_000
"""Bytes of a weights file; a rank holds at most two of them while a policy is written."""


def start_ranks() -> None:
    """Connects the ranks, before the first model is split."""
    deepspeed = import_shims.import_deepspeed()
    deepspeed_config.disable_compiled_operations()
    ranks.use_single_process()
    cuda = devices.device_type() == "cuda"
    if cuda:
        torch.cuda.set_device(ranks.current().local)
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo")


def minimal_configuration(dtype: str) -> JSON:
    """DeepSpeed's configuration for a split model without an optimizer."""
    formats = {"bf16": {"enabled": dtype == "bfloat16"}, "fp16": {"enabled": dtype == "float16"}}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, **formats}


def load(policy: Policy, dtype: str, configuration: JSON, **options: object) -> PreTrainedModel | None:
    """Loads a full model split over the ranks.

    Args:
        policy: the model, or an adapter on it.
        dtype: number format of the weights.
        configuration: DeepSpeed's, with ZeRO 3.
        options: further arguments of `from_pretrained`.

    Returns:
        The model; None if transformers renames or joins tensors of the file (such as experts), which needs all at once.

    Raises:
        UserError: its weights are not exactly the tensors of the model.
    """
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    shapes: Any = plain_model.load_plain(policy, "float32", device_map="meta")
    if getattr(shapes, "_weight_conversions", None):
        return None
    _check_tied(shapes, policy.base)
    active = HfDeepSpeedConfig(configuration)  # transformers keeps a weak reference to it
    try:
        model: PreTrainedModel = plain_model.from_pretrained(policy, dtype, **options)
    finally:
        unset_hf_deepspeed_config()
        del active
    _restore_buffers(model, dtype, policy.trust_remote_code)
    return model


def _restore_buffers(model: PreTrainedModel, dtype: str, trust_remote_code: bool) -> None:
    """Gives a model the buffers that transformers computes without `zero.Init`, which makes them (such as rotary
    frequencies) in the number format of the weights. Buffers that are in the file stay.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        exact = AutoModelForCausalLM.from_config(
            model.config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
        )
    in_file = model.state_dict().keys()
    for name, buffer in dict(exact.named_buffers()).items():
        if name not in in_file:
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            module.register_buffer(leaf, buffer.to(module.get_buffer(leaf).device), persistent=False)


def _check_tied(model: Any, base: Path) -> None:
    """Checks that tied tensors that a file has twice are equal; transformers would not see it once they are split."""
    from safetensors import safe_open

    tied = dict(model.get_expanded_tied_weights_keys(all_submodels=True))
    names = {*tied, *tied.values()}
    tensors: dict[str, Tensor] = {}
    for file in sorted(base.glob("*.safetensors")) if tied else []:
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in names & set(opened.keys())}
    for name, source in tied.items():
        if name in tensors and source in tensors and not torch.equal(tensors[name], tensors[source]):
            raise UserError(
                f"{base}: {name} is not equal to the tensor that config.json ties it to; set tie_word_embeddings: "
                "false there"
            )


def gather_for_forward(model: nn.Module) -> list[Any]:
    """Makes each module of a split model gather its weights while it computes; every rank must run it.

    Returns:
        Handles of the hooks, to remove them.
    """
    from deepspeed import zero

    open_modules: dict[int, Any] = {}

    def before(module: nn.Module, *_: object) -> None:
        split = [parameter for parameter in module.parameters(recurse=False) if hasattr(parameter, "ds_id")]
        if split:
            open_modules[id(module)] = zero.GatheredParameters(split)
            open_modules[id(module)].__enter__()

    def after(module: nn.Module, *_: object) -> None:
        if (gathered := open_modules.pop(id(module), None)) is not None:
            gathered.__exit__(None, None, None)

    handles: list[Any] = []
    for module in model.modules():
        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    return handles


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """A block in which a model computes though it is split and no engine of DeepSpeed is around it yet."""
    handles = gather_for_forward(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def weights(model: nn.Module, trained_only: bool) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a split model, one at a time, on the CPU of the first rank; every rank must exhaust it.

    Args:
        model: a model of transformers or PEFT.
        trained_only: leaves out tensors without gradient, such as the base of an adapter.
    """
    for name, tensor in _tensors(model).items():
        if tensor.requires_grad or not trained_only:
            whole = _whole(tensor, ranks.current().first)
            if whole is not None:
                yield name, whole


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def _whole(tensor: Tensor, keep: bool) -> Tensor | None:
    """A copy on the CPU of a tensor that all ranks put together, for those that keep it."""
    from deepspeed import zero

    with zero.GatheredParameters([tensor]) if hasattr(tensor, "ds_id") else nullcontext():
        return tensor.detach().to("cpu", copy=True).contiguous() if keep else None


def write_together(model: nn.Module, target: Path) -> dict[str, str]:
    """Writes the weights of a split model; each rank writes some of the files. Every rank must call it.

    Files are as `write_shards` makes them, whatever the number of ranks.

    Args:
        model: a model of transformers.
        target: folder that all ranks see.

    Returns:
        BLAKE3 digests of all files, by name.
    """
    rank, tensors = ranks.current(), _tensors(model)
    sizes = {name: int(getattr(each, "ds_numel", each.numel())) * each.element_size() for name, each in tensors.items()}
    shards = _shards(sizes)
    files, writing = _names(len(shards)), dict[str, Future[str]]()
    with ThreadPoolExecutor(1) as thread:
        for number, (file, names) in enumerate(zip(files, shards, strict=True)):
            own = number % rank.world == rank.number
            whole = {name: tensor for name in names if (tensor := _whole(tensors[name], own)) is not None}
            if own:
                wait(writing.values())  # at most one beside the one that is put together
                writing[file] = thread.submit(_write, whole, target / file)
    own_digests = {file: each.result() for file, each in writing.items()}
    of_ranks: list[Any] = [own_digests] * rank.world
    if rank.world > 1:
        torch.distributed.all_gather_object(of_ranks, own_digests)
    if rank.first:
        _write_index(target, files, shards, sum(sizes.values()))
    return {file: digest for digests in of_ranks for file, digest in digests.items()}


def _shards(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names of the tensors in each file, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, each in sizes.items():
        if shards[-1] and size + each > SHARD:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += each
    return shards


def _write(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Writes a file through to the disk, since no other node can; returns its digest."""
    from safetensors.torch import save_file

    with translate_disk_full(path.parent):
        save_file(dict(tensors), path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return manifest.digest(path)


def write_shards(tensors: Iterable[tuple[str, Tensor]], target: Path) -> None:
    """Writes tensors to safetensors files of at most `SHARD` bytes (or one tensor) each, with an index if several."""
    from safetensors.torch import save_file

    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    size = total = 0

    def write() -> None:
        save_file(shard, target / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD:
            write()
            size = 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    write()
    files = _names(len(shards))
    for number, file in enumerate(files):
        (target / f"{number}.part").rename(target / file)
    _write_index(target, files, shards, total)


def _names(count: int) -> list[str]:
    """Names of so many weights files."""
    stem = WEIGHTS.removesuffix(".safetensors")
    return (
        [f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)] if count > 1 else [WEIGHTS]
    )


def _write_index(target: Path, files: Sequence[str], shards: Sequence[Sequence[str]], total: int) -> None:
    """Writes which file has which tensor, if there are several; `total` is the bytes of all."""
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
