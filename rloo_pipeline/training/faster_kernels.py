"""Kernels that replace several of PyTorch's, and compiled layers, each only if it gives the results of plain
transformers.

GPUs have Liger's RMSNorm, SwiGLU and rotary embeddings (arXiv 2410.10989), depending on the type of the model, and the
head's loss in one pass (`one_pass`). Once per process and configuration, the self-check's small copy of the model runs
with each of them on the GPU, and is compared with plain transformers on the CPU. FlashAttention 3 has a separate check,
in 16 bits (`kernels/flash_attention_3.py`). A kernel that fails is left out, with a line in the log.

The key `update.torch_compile` is torch.compile of each decoder layer, for packs of any length. Layers of one kind share
their code. Attention runs between two graphs of a layer, as it does without the key. The small copy is compiled and
compared first, with the kernels that have passed. Compiled code depends on the shapes that came first. So that it
depends neither on the data nor on a resume, a fixed pack goes through the layers before any other.
"""

import contextlib
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.runtime import caches, devices, guard, host_copies
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.training import batch_forms, self_check
from rloo_pipeline.training.batch_forms import FORMS
from rloo_pipeline.training.kernels import flash_attention_3
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.self_check import against_plain
from rloo_pipeline.training.self_check.against_plain import SelfCheck
from rloo_pipeline.transformers_internals.loaded_model import decoder_layers, takes_experts

ROTARY = "rotary_pos_emb"
"""Part of the names of the transformers functions that Liger replaces for all models of a type."""
COMPILED = "compiled layers"
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable for the folder of compiled code."""
OWN = "rloo-"
"""Prefix of the folders in it."""
_problems: dict[tuple[str, str], str] = {}
"""Results, by kernels (or `COMPILED`) and digest of the self-check."""


def install(model: Any, policy: Policy, checked: SelfCheck) -> None:
    """Gives a model on a GPU the kernels that pass their check.

    Args:
        model: causal language model of transformers.
        policy: its policy.
        checked: its self-check.
    """
    if (device := devices.device_type()) == "cpu":
        return
    if why := flash_attention_3.install(device):
        say(f"{checked.model} trains without FlashAttention 3 ({why})")
    source = policy.transformers_config, policy.trust_remote_code
    for name, use in KERNELS.items():
        if (name, checked.digest) not in _problems:
            _problems[name, checked.digest] = problem(use, *source, checked, device)
            if why := _problems[name, checked.digest]:
                say(f"{checked.model} trains without {name} ({why})")
        if passed(name, checked):
            use(model)


def passed(name: str, checked: SelfCheck) -> bool:
    """True if `install` uses a kernel for the model of this self-check."""
    return _problems.get((name, checked.digest)) == ""


def problem(use: Callable[[Any], None], config: Any, trust_remote_code: bool, checked: SelfCheck, device: str) -> str:
    """The reason some kernels cannot be used for a model; empty if they can.

    Args:
        use: installs the kernels in a model.
        config: transformers configuration of the model.
        trust_remote_code: allows the model's own code to run.
        checked: its self-check, for the form of batch.
        device: device on which to check them.
    """

    def prepare(model: Any) -> None:
        use(model.to(device))

    cudnn: Any = torch.backends.cudnn
    usual, cudnn.allow_tf32 = cudnn.allow_tf32, False  # a GPU would multiply an image's patches in TF32
    try:
        self_check.run(config, trust_remote_code, checked.images, [FORMS[checked.form]], prepare)
    except Exception as error:  # any exception: a library's kernel may fail on this card
        for module in _transformers():  # the language model of a model with images has its functions in another module
            _restore_rotary(vars(module))
        return one_line(error)
    finally:
        cudnn.allow_tf32 = usual
    return ""


def _transformers() -> list[ModuleType]:
    """The modeling modules of transformers that have been imported."""
    return [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]


def liger(model: Any) -> None:
    """Makes a model, if Liger knows its type, compute with Liger's kernels where its tensors are on a GPU.

    A model also computes on the CPU, before DeepSpeed moves it, so each replaced function goes by the device. Liger
    also replaces classes in transformers' modules; these are restored, since small models on the CPU are built from
    them.
    """
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it reports kernels that are for other devices
    guard.require("liger-kernel")
    from liger_kernel.backends import set_impl
    from liger_kernel.transformers import monkey_patch

    set_impl("nvidia-triton")  # else the choice depends on which other libraries are installed
    modules = _transformers()
    before, forwards = [dict(vars(module)) for module in modules], {part: part.forward for part in model.modules()}
    # Liger's defaults for the type, except for layers whose experts are counted and replayed, and for an
    # activation in a table that all models share
    without = ["layer_norm", "relu_squared", "cross_entropy", "fused_linear_cross_entropy"]
    without += ["swiglu"] if any(map(takes_experts, model.modules())) else []
    try:
        monkey_patch._apply_liger_kernel_to_instance(model, **dict.fromkeys(without, False))
    finally:  # if it fails, it may have replaced some of them already
        for module, names in zip(modules, before, strict=True):
            for name, usual in names.items():
                if (fast := vars(module)[name]) is not usual:
                    setattr(module, name, _by_device(usual, fast) if ROTARY in name else usual)
    for part, usual in forwards.items():
        if part.forward != usual:
            part.forward = _by_device(usual, part.forward)


def _by_device(usual: Any, fast: Any) -> Any:
    """A function of a tensor and other arguments that calls Liger on a GPU and transformers on a CPU."""
    usual = getattr(usual, "usual", usual)

    def by_device(tensor: Any, *arguments: Any, **options: Any) -> Any:
        return (usual if tensor.device.type == "cpu" else fast)(tensor, *arguments, **options)

    by_device.usual = usual  # type: ignore[attr-defined]
    return by_device


def _restore_rotary(names: dict[str, Any]) -> None:
    """Restores transformers' own functions in a module, given its names."""
    names |= {name: value.usual for name, value in names.items() if ROTARY in name and hasattr(value, "usual")}


def one_pass(model: Any) -> None:
    """Makes the head of a model compute its losses in one pass."""
    from rloo_pipeline.training.one_pass import use

    use(model)


KERNELS: dict[str, Callable[[Any], None]] = {"Liger's kernels": liger, "the head's loss in one pass": one_pass}


def compile_layers(model: Any) -> None:
    """Makes the layers of a model compile at their first call; names of its parameters stay."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def require_compilable(model: Any, form: str) -> None:
    """Raises UserError if a full model, which trains in this form of batch, has layers that are not compiled here."""
    if form != batch_forms.Packed.name:
        raise _refusal(model, f"it trains in {form} batches, not in packed ones")
    if any(map(takes_experts, model.modules())):
        raise _refusal(model, "it is a mixture of experts")
    if not decoder_layers(model):
        raise _refusal(model, "transformers does not say which modules are its layers")


def _refusal(model: Any, why: str) -> UserError:
    return UserError(f"update.torch_compile: {type(model).__name__} cannot train with it ({why}); remove the key")


def install_compiled(module: TokenLogProbs, policy: Policy, device: torch.device) -> None:
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
    require_compilable(base, checked.form)

    def prepare(model: Any) -> None:
        for name, use in KERNELS.items():
            if passed(name, checked):
                use(model)
        compile_layers(model)

    folder = _set_cache_folder(f"{caches.instructions()} {checked.digest} {base.dtype} {base}")
    # Torch writes libraries in place. A half-written one would end each later stage, or, if it is torch's trial of the
    # processor's instructions, change the code. Ranks that share sequences must compile together, so they cannot wait.
    with caches.compiling(folder, "complete") if module.group.size == 1 else contextlib.nullcontext():
        if (key := (COMPILED, checked.digest)) not in _problems:
            source = policy.transformers_config, policy.trust_remote_code
            _problems[key] = problem(prepare, *source, checked, str(device))
            torch.compiler.reset()  # layers of the small copy would count towards the limit of recompilations
        if why := _problems[key]:
            raise _refusal(base, why)
        compile_layers(base)
        _compile(module, base, device)


def _compile(module: TokenLogProbs, base: Any, device: torch.device) -> None:
    """Compiles the layers for passes with and without gradients, on the self-check's sequences."""
    sequences = against_plain.probe(base.config, module.length_limit)
    arguments, _ = module.form.inputs(sequences.pick(range(4), module.group).to(device))
    trained = next(parameter for parameter in base.parameters() if parameter.requires_grad)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for training in (False, True):
            module.train(training)
            with torch.set_grad_enabled(training), host_copies.activations(module.offloads):
                states = base.base_model(**arguments, use_cache=False).last_hidden_state
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
