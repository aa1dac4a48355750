"""Weights in a vLLM engine: full models that are reloaded, and LoRA adapters.

vLLM's reload leaves copies of some weights stale; `reload_weights` renews them. For adapters, vLLM finds layers by the
last part of their names, fuses some (`q_proj`, `k_proj` and `v_proj` into `qkv_proj`), and silently drops modules that
none of its layers takes. So we compare the modules after the adapter is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.model_files import ADAPTER_WEIGHTS
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import IncompatibleEngine, UserError, one_line
from rloo_pipeline.runtime import devices, guard
from rloo_pipeline.runtime.progress import say

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of max_lora_rank that vLLM allows."""
PREFIX = "base_model.model."
"""Prefix of tensor names in PEFT's files."""


def adapter_settings(policy: Policy) -> dict[str, Any]:
    """vLLM's settings for a policy's adapter.

    They name the modules that the adapter changes. Otherwise vLLM would also prepare layers of experts for adapters,
    which fails on CPUs. The names are last parts: PEFT writes whole paths for `all-linear`, from which vLLM would find
    only the unfused layers.
    """
    names = sorted({module.rpartition(".")[2] for module in modules(policy.folder)})
    rank = policy.adapter["r"]
    return {"enable_lora": True, "max_lora_rank": vllm_lora_rank(rank), "lora_target_modules": names}


def modules(folder: Path) -> list[str]:
    """Names in transformers of the modules that an adapter changes, read from its tensors.

    Raises:
        UserError: the adapter also replaces whole modules (PEFT's modules_to_save), which vLLM does not serve.
    """
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        names = [name.removeprefix(PREFIX) for name in file.keys()]  # noqa: SIM118
    parts = [name.partition(".lora_") for name in names if ".base_layer." not in name]
    if whole := sorted({name.rpartition(".")[0] for name, separator, _ in parts if not separator}):
        raise UserError(
            f"{folder}: the adapter replaces {_named(whole)} as a whole (modules_to_save), which vLLM does not serve; "
            "train adapters of linear layers alone"
        )
    return sorted({name for name, *_ in parts})


def vllm_lora_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that is at least `rank`."""
    return next(allowed for allowed in LORA_RANKS if allowed >= rank)


def request_of(policy: Policy, number: int) -> LoRARequest:
    """A request for a policy's adapter, under an id that the engine has not seen."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"{policy.folder.name}-{number}", number, str(policy.folder))


def load_adapter(llm: LLM, request: LoRARequest) -> None:
    """Loads an adapter into an engine.

    Raises:
        UserError: vLLM refuses it, or does not apply all of its modules.
    """
    guard.require("vllm")
    folder = Path(request.lora_path)
    try:
        llm.llm_engine.add_lora(request)
    except Exception as error:
        raise UserError(f"{folder}: vLLM does not serve this adapter ({one_line(error)}); {ADVICE}") from error
    left = {name for names in llm.apply_model(partial(_not_applied, number=request.lora_int_id)) for name in names}
    if left:
        raise UserError(
            f"{folder}: vLLM has no layers for the adapter's {_named(left)}, and would sample from a policy without "
            f"them; {ADVICE}"
        )


ADVICE = "leave these modules out of update.lora.target_modules, or train all weights"


def _not_applied(model: Any, number: int) -> list[str]:
    """Names of a loaded adapter's modules that no layer of the engine's model has taken."""
    manager = model.lora_manager
    adapter = manager.get_adapter(number)
    taken = {id(manager._get_lora_layer_weights(adapter, name)) for name in manager.modules}
    return [name for name, weights in adapter.loras.items() if id(weights) not in taken]


def _named(names: Iterable[str]) -> str:
    """Lists modules by the last part of their names, with the number of each."""
    last = [name.rpartition(".")[2] for name in names]
    return ", ".join(f"{name} ({last.count(name)} times)" for name in sorted(set(last)))


def reload_weights(llm: LLM, folder: Path) -> None:
    """Loads the full model in `folder` into an engine that holds another one of the same configuration.

    Raises:
        IncompatibleEngine: vLLM fails, or leaves experts out, as it does with those of gpt-oss.
    """
    llm.apply_model(_reset_packed_experts)
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        llm.apply_model(_repack_lm_head)
    except Exception as error:  # of any kind: a new engine loads the policy in another way
        raise _refusal(f"vLLM fails to load other weights into an engine ({error or type(error).__name__})") from error
    if not_loaded := [name for names in llm.apply_model(_experts_left_out) for name in names]:
        raise _refusal(f"vLLM does not load experts such as {not_loaded[0]} into a running engine")


def _refusal(why: str) -> IncompatibleEngine:
    say(f"{why}, so the policy gets a new engine")
    return IncompatibleEngine("weights of another policy that vLLM cannot replace")


def _reset_packed_experts(model: Any) -> None:
    """Makes a reload pack the weights of all experts: on CPUs vLLM packs only the first ones again, and would compute
    with the others as if they were packed.
    """
    if devices.device_type() == "cuda":
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _experts_left_out(model: Any) -> list[str]:
    """Names of the layers of experts that `_reset_packed_experts` has reset and no reload has packed again."""
    methods = {name: getattr(module, "quant_method", None) for name, module in model.named_modules()}
    return [name for name, method in methods.items() if method and getattr(method, "moe_kernel", method) is None]


def _repack_lm_head(model: Any) -> None:
    """Renews the packed copy of the LM head, which may be the embedding itself; where it is tied, a reload leaves the
    old copy.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)
