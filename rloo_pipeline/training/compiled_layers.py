"""The key `update.torch_compile`: torch.compile of each decoder layer, for packs of any length.

Layers of one kind share their code. Attention runs between two graphs of a layer, as it does without the key. Before
the model is compiled, the self-check's small copy is compiled and compared with plain transformers.

Compiled code depends on the shapes that came first. So that it depends neither on the data nor on a resume, a fixed
pack goes through the layers before any other.
"""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import caches
from rloo_pipeline.training import batch_forms, faster_kernels, host_copies
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.self_check import against_plain, small
from rloo_pipeline.transformers_internals.loaded_model import decoder_layers, takes_experts

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable for the folder of compiled code."""
OWN = "rloo-"
"""Prefix of the folders in it."""
_problems: dict[str, str] = {}
"""Results, by digest of the self-check."""


def use(model: Any) -> None:
    """Makes the layers of a model compile at their first call; names of its parameters stay."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def require(model: Any, form: str) -> None:
    """Raises UserError if a full model, which trains in this form of batch, has layers that are not compiled here."""
    if form != batch_forms.Packed.name:
        raise _refusal(model, f"it trains in {form} batches, not in packed ones")
    if any(map(takes_experts, model.modules())):
        raise _refusal(model, "it is a mixture of experts")
    if not decoder_layers(model):
        raise _refusal(model, "transformers does not say which modules are its layers")


def _refusal(model: Any, why: str) -> UserError:
    return UserError(f"update.torch_compile: {type(model).__name__} cannot train with it ({why}); remove the key")


def install(module: TokenLogProbs, policy: Policy, device: torch.device) -> None:
    """Compiles the layers of a model in training, after a check of the compiled layers.

    Args:
        module: model on the device.
        policy: its policy, for the check.
        device: device that trains the model.

    Raises:
        UserError: its layers cannot be compiled, or do not give what plain transformers gives.
    """
    base = module.full_model
    checked = base.self_check
    require(base, checked.form)
    folder = _set_cache_folder(f"{caches.instructions()} {checked.digest} {base.dtype} {base}")
    # Torch writes libraries in place. A half-written one would end each later stage, or, if it is torch's trial of the
    # processor's instructions, change the code. Ranks that share sequences must compile together, so they cannot wait.
    with caches.compiling(folder, "complete") if module.group.size == 1 else contextlib.nullcontext():
        if checked.digest not in _problems:
            _problems[checked.digest] = _problem(base, policy, device)
            torch.compiler.reset()  # layers of the small copy would count towards the limit of recompilations
        if why := _problems[checked.digest]:
            raise _refusal(base, why)
        use(base)
        _compile(module, base, device)


def _problem(base: Any, policy: Policy, device: torch.device) -> str:
    """The reason a model's layers cannot be compiled; empty if they can."""
    checked = base.self_check

    def prepare(model: Any) -> None:
        for name, kernel in faster_kernels.KERNELS.items():
            if faster_kernels.passed(name, checked):
                kernel(model)
        use(model)

    source = policy.transformers_config, policy.trust_remote_code
    return faster_kernels.problem(prepare, *source, checked, str(device))


def _compile(module: TokenLogProbs, base: Any, device: torch.device) -> None:
    """Compiles the layers for passes with and without gradients, on the self-check's sequences."""
    longest = min(against_plain.LONGEST, module.length_limit.tokens if module.length_limit else against_plain.LONGEST)
    sequences = against_plain.probe(small.words(base.config), longest)
    inputs = module.form.inputs(sequences.pick(range(4), module.group).to(device))
    trained = next(parameter for parameter in base.parameters() if parameter.requires_grad)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for training in (False, True):
            module.train(training)
            with torch.set_grad_enabled(training), host_copies.activations(module.offloads):
                states = base.base_model(**inputs.arguments, use_cache=False).last_hidden_state
            if training:
                torch.autograd.grad(states.sum(), trained)  # leaves all gradients as they are


def _set_cache_folder(code: str) -> Path:
    """Keeps compiled code in the cache folder, unless the environment names another; torch would keep it in TMPDIR.

    Each code has its own folder, also for each processor with other instructions, which the code may use.
    """
    top = Path(os.environ.get(CACHE, tempfile.gettempdir()))
    if top.name.startswith(OWN):  # an earlier engine's
        top = top.parent
    if top.is_relative_to(tempfile.gettempdir()):
        top = caches.cache_folder() / "torchinductor"
    folder = top / f"{OWN}{hashlib.sha256(code.encode()).hexdigest()[:12]}"
    os.environ[CACHE] = str(folder)
    return folder
