"""LoRA adapters in a vLLM engine: the engine's settings, and a check that it applies all modules.

vLLM finds layers by the last part of their names, fuses some (`q_proj`, `k_proj` and `v_proj` into `qkv_proj`), and
silently drops modules that none of its layers takes. So we compare the modules after the adapter is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.model_files import ADAPTER_WEIGHTS
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.runtime import guard

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of max_lora_rank that vLLM allows."""
PREFIX = "base_model.model."
"""Prefix of tensor names in PEFT's files."""


def settings(policy: Policy) -> dict[str, Any]:
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


def load(llm: LLM, request: LoRARequest) -> None:
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
