"""Models that are split over the ranks from the start (ZeRO 3), so that no process ever holds all weights.

DeepSpeed's `zero.Init` splits each tensor as soon as it is read. Weights are gathered one module at a time to compute,
and one tensor at a time to be written (`weight_files.py`). Parts of them may be in files on a disk (`nvme.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rloo_pipeline.config import JSON, Deepspeed
from rloo_pipeline.runtime import devices, ranks
from rloo_pipeline.training.deepspeed_internals import deepspeed_config, nvme
from rloo_pipeline.transformers_internals import loaded_model


def start_ranks() -> None:
    """Connects the ranks before they load a model; waits for all of them, since each has checked some of its files."""
    deepspeed = deepspeed_config.import_deepspeed()
    deepspeed_config.disable_compiled_operations()
    ranks.use_single_process()
    cuda = devices.device_type() == "cuda"
    if cuda:
        torch.cuda.set_device(ranks.current().local)
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo")
    if ranks.current().world > 1:
        torch.distributed.barrier()


def minimal_configuration(dtype: str) -> JSON:
    """DeepSpeed's configuration for a split model without an optimizer."""
    formats = {"bf16": {"enabled": dtype == "bfloat16"}, "fp16": {"enabled": dtype == "float16"}}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, **formats}


def on_disk(model: nn.Module, section: Deepspeed) -> JSON:
    """DeepSpeed's keys for a model of which parts are in files on this node's disk; its tensors need no values.

    Raises:
        UserError: see `nvme.new_folder`.
    """
    world = ranks.current().world
    sizes = [parameter.numel() for parameter in model.parameters()]
    share, largest = -(-sum(sizes) // world), -(-max(sizes) // world)
    written = share * sum(nvme.WRITTEN[part] for part, place in section.offload if place == "nvme")
    device = {"device": "nvme", "nvme_path": str(nvme.new_folder(section.nvme_path, written))}
    keys: JSON = {"sub_group_size": nvme.SUB_GROUP, "offload_optimizer": {**device, "buffer_count": nvme.BUFFERS}}
    if section.offload.parameters == "nvme":
        most = max(len(list(module.parameters(recurse=False))) for module in model.modules())
        size, count = largest + nvme.ALIGNED, max(nvme.READ, 2 * most)
        keys["offload_param"] = {**device, "buffer_count": count, "buffer_size": size, "max_in_cpu": 0}
        # each module returns its buffers at once, because DeepSpeed does not wait for a free one
        keys |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    nvme.replace_access()
    return keys


def split_each(parameters: Iterator[nn.Parameter], configuration: JSON) -> None:
    """Splits the parameters of a model, each before the next is read; `configuration` is DeepSpeed's, with ZeRO 3."""
    from deepspeed import zero

    source: Any = nn.Module()
    source.parameters = lambda **_: parameters
    zero.Init(source, config_dict_or_path=configuration)


def gather_for_forward(model: nn.Module) -> list[Any]:
    """Makes each module of a split model gather its weights while it computes; every rank must run the model.

    Returns:
        Handles that remove the hooks.
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
    """A block in which a split model can compute before a DeepSpeed engine wraps it."""
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
    for name, tensor in tensors(model).items():
        if tensor.requires_grad or not trained_only:
            whole = on_cpu(tensor, ranks.current().first)
            if whole is not None:
                yield name, whole


def tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers, without those that are tied to others (such as an `lm_head.weight`)."""
    persistent, tied = model.state_dict().keys(), loaded_model.tied_weights(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    named = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
    return {name: tensor for name, tensor in named.items() if name not in tied}


def on_cpu(tensor: Tensor, keep: bool) -> Tensor | None:
    """A tensor on the CPU for the ranks that keep it; all ranks help to gather a split one."""
    if not hasattr(tensor, "ds_id"):
        return tensor.detach().cpu() if keep else None
    from deepspeed import zero

    with zero.GatheredParameters([tensor]):
        return tensor.detach().to("cpu", copy=True) if keep else None
