"""The optimizers of `update.optimizer`. The mathematics is in torch, bitsandbytes and transformers.

ZeRO flattens each parameter group and gives every process a slice of it, which makes no difference to AdamW. The other
optimizers get one group per parameter, so that bitsandbytes keeps the moments of small ones in 32 bits and needs little
memory at a time. Adafactor and Muon need whole matrices: for the step, hooks restore the shape of a flat group, which
works only in a process that holds all of it (`Config` refuses other cases).

As in transformers' Trainer, and so in TRL, biases and the weights of norms do not decay.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

if TYPE_CHECKING:
    from rloo_pipeline.training.settings import TrainerSettings

Group = dict[str, Any]
HEADS = {"lm_head", "embed_out"}
"""Names of output layers."""
SPARED = re.compile(r"bias|layernorm|rmsnorm|(^|[._])norm($|\.)")
"""Pattern of the names of parameters that do not decay. Those of torch's LayerNorm never do."""


def build(module: nn.Module, settings: TrainerSettings) -> Optimizer:
    """Builds the optimizer that the settings name over a module's trainable parameters, for `deepspeed.initialize`."""
    rate, decay = settings.learning_rate.peak, settings.weight_decay
    adam: dict[str, Any] = {"betas": settings.adam_betas, "eps": settings.adam_epsilon}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    spared = _undecayed(module) if decay else set[int]()
    if settings.optimizer == "adamw":
        return AdamW(_by_decay(trained, spared), lr=rate, weight_decay=decay, fused=True, **adam)
    groups = [group for parameter in trained for group in _by_decay([parameter], spared)]
    for group in groups:
        group["shape"] = tuple(group["params"][0].shape)
    if settings.optimizer == "adamw_8bit":
        from bitsandbytes.optim.adamw import AdamW8bit

        return AdamW8bit(groups, lr=rate, weight_decay=decay, **adam)  # type: ignore[no-untyped-call]
    if settings.optimizer == "adafactor":  # with the options of transformers' and TRL's `optim: adafactor`
        from transformers import Adafactor

        options: dict[str, Any] = {"scale_parameter": False, "relative_step": False}
        return _on_whole_matrices(Adafactor(groups, lr=rate, weight_decay=decay, **options))
    apart = _embeddings(module)
    for group in groups:
        group["use_muon"] = len(group["shape"]) == 2 and id(group["params"][0]) not in apart
    return _on_whole_matrices(MuonWithAdamW(groups, rate, decay, adam))


def _undecayed(module: nn.Module) -> set[int]:
    """Ids of the parameters that do not decay."""
    by_layer = [p for layer in module.modules() if isinstance(layer, nn.LayerNorm) for p in layer.parameters()]
    by_name = [p for name, p in module.named_parameters() if SPARED.search(name.lower())]
    return {id(parameter) for parameter in (*by_layer, *by_name)}


def _by_decay(parameters: list[nn.Parameter], spared: set[int]) -> list[Group]:
    """Groups parameters into those that decay and those that do not; leaves out an empty group."""
    decaying, others = ([p for p in parameters if (id(p) in spared) is is_spared] for is_spared in (False, True))
    groups: list[Group] = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _embeddings(module: nn.Module) -> set[int]:
    """Ids of the weights of embeddings and output layers, which Muon leaves to AdamW."""
    layers = [
        layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Embedding) or name.rpartition(".")[2] in HEADS
    ]
    return {id(parameter) for layer in layers for parameter in layer.parameters()}


def _on_whole_matrices(optimizer: Optimizer) -> Optimizer:
    """Makes an optimizer see parameters in the shape that their group names during a step; flattens them again
    afterwards.
    """
    flat: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def shape(*_: object) -> None:
        for group in optimizer.param_groups:
            [parameter], size = group["params"], torch.Size(group["shape"])
            if parameter.grad is not None and parameter.shape != size:
                flat.append((parameter, parameter.data, parameter.grad))
                _set_data(
                    parameter, *(values[: size.numel()].view(size) for values in (parameter.data, parameter.grad))
                )

    def flatten(*_: object) -> None:
        while flat:
            _set_data(*flat.pop())

    optimizer.register_step_pre_hook(shape)
    optimizer.register_step_post_hook(flatten)
    return optimizer


def _set_data(parameter: torch.Tensor, data: torch.Tensor, gradient: torch.Tensor) -> None:
    """Points a parameter and its gradient to other tensors; torch requires that both always have the same shape."""
    parameter.grad = None
    parameter.data = data
    parameter.grad = gradient


class MuonWithAdamW(Optimizer):
    """torch's Muon for groups with `use_muon`, AdamW for the others.

    `match_rms_adamw` gives Muon's step the root mean square of an AdamW step, so that both share one learning rate. Its
    momentum is torch's default, 0.95.
    """

    def __init__(self, groups: list[Group], rate: float, decay: float, adam: dict[str, Any]) -> None:
        """Both optimizers over `groups`, with a peak learning rate, weight decay and AdamW's options."""
        muon, others = _groups_of(groups, use_muon=True), _groups_of(groups, use_muon=False)
        self._parts: list[tuple[bool, Optimizer]] = []
        if muon:
            self._parts.append((True, Muon(muon, rate, decay, adjust_lr_fn="match_rms_adamw")))
        if others:
            self._parts.append((False, AdamW(others, lr=rate, weight_decay=decay, fused=True, **adam)))
        super().__init__(groups, {"lr": rate})

    def step(self, *_: object) -> None:  # type: ignore[override]
        """Takes a step with both, on this optimizer's groups and state, which loading a checkpoint replaces."""
        for use_muon, optimizer in self._parts:
            optimizer.param_groups = _groups_of(self.param_groups, use_muon=use_muon)
            optimizer.state = self.state
            optimizer.step()


def _groups_of(groups: list[Group], use_muon: bool) -> list[Group]:
    """The groups of one of the two optimizers."""
    return [group for group in groups if group["use_muon"] is use_muon]
