"""vLLM for lm-eval, which starts its own engine, with the settings of rollouts where they apply."""

import importlib
import importlib.metadata
import os
from contextlib import AbstractContextManager
from typing import Any

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import JSON, Config, Harness, Vllm
from rloo_pipeline.data.prompting import date_of
from rloo_pipeline.rollout import engine_arguments, vllm_internals
from rloo_pipeline.rollout.engine_arguments import EngineSettings
from rloo_pipeline.runtime import devices
from rloo_pipeline.runtime.import_shims import replaced
from rloo_pipeline.user_code.completion_text import THINK_END


def prepare(settings: Vllm) -> None:
    """Imports vLLM and lm-eval's backend for it."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
    os.environ.setdefault(vllm_internals.SWITCH, "0")
    vllm_internals.import_vllm()
    vllm_internals.rotate_heads()
    with by_either_name():
        importlib.import_module("lm_eval.models.vllm_causallms")


def by_either_name() -> AbstractContextManager[None]:
    """A block in which `vllm` appears to have the version of `vllm-cpu`: lm-eval looks it up on import, but the CPU
    build of vLLM is the distribution `vllm-cpu`.
    """
    from vllm.platforms import current_platform

    current_platform.is_cpu()  # vLLM detects its platform from its version, so it must do that before the patch
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu")

    return replaced(importlib.metadata, "version", version)


def arguments(config: Config, section: Harness, policy: Policy) -> dict[str, Any]:
    """vLLM's options, in the form that lm-eval's backend takes."""
    on_gpu = devices.device_type() == "cuda"
    settings: dict[str, Any] = {
        "pretrained": str(policy.base),
        "dtype": config.model.dtype,
        "trust_remote_code": policy.trust_remote_code,
        "tensor_parallel_size": config.vllm.tensor_parallel_size,
        "max_model_len": section.max_model_len,
        "seed": config.seed & 0x7FFFFFFF,
        "batch_size": "auto",
        "enforce_eager": not on_gpu,
        "enable_chunked_prefill": on_gpu,
        "generation_config": "vllm",
    }
    if on_gpu:
        longest = section.max_model_len or policy.context
        vllm = config.vllm  # the stage gets no section `rollout`
        share, parallel = vllm.gpu_memory_utilization, vllm.tensor_parallel_size
        engine = EngineSettings(config.model.dtype, share, vllm.kv_cache_gib, parallel)
        if longest:
            card = engine_arguments.visible_gpu(parallel)
            settings |= engine_arguments.gpu_arguments(policy, engine, card, longest, kept=False)
        else:
            settings["gpu_memory_utilization"] = share
    if section.apply_chat_template:
        settings |= _template_arguments({**date_of(policy.tokenizer), **config.dataset.chat_template_kwargs})
    if policy.is_adapter:
        settings |= {"lora_local_path": str(policy), **engine_arguments.adapter_arguments(policy)}
    return settings


def _template_arguments(variables: JSON) -> dict[str, Any]:
    """The variables of the chat template. lm-eval 0.4.13 takes `enable_thinking` by itself and ignores it among the
    others. Where it is on, task stop strings and scores apply to the text after the thinking.
    """
    thinking = variables.get("enable_thinking")
    settings = {"chat_template_args": {**variables}, "enable_thinking": thinking}
    return settings | ({"think_end_token": THINK_END} if thinking else {})
