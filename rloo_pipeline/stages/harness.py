"""harness: tasks of lm-eval on a policy, with its vLLM backend and without network → harness.json.

Prompts, examples and scores are those of lm-eval. Fields of its results that depend on the clock or the host are left
out.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts import model_dims
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import JSON, Config, Harness
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.rollout import adapters, cpu_kernels, engine_process, engine_size
from rloo_pipeline.rollout.sampler import visible_gpu
from rloo_pipeline.runtime import devices, import_shims
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.training import plain_model

RESULT_KEYS = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")


def harness(config: Config, policy: Policy, name: str, output: Path) -> None:
    """Evaluates a policy on the tasks of `evaluation.harness`.

    Args:
        config: the stage's configuration.
        policy: the policy.
        name: name of the evaluation.
        output: harness.json.

    Raises:
        UserError: lm-eval does not know a task, its data is missing, or the policy is not complete.
    """
    section = section_of(config)
    plain_model.check_tensors(policy)
    digest = policy.digest
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.vllm.kv_cache_gib)
    os.environ.setdefault(engine_process.SWITCH, "0")
    import_shims.import_vllm()
    cpu_kernels.rotate_heads()
    load_tasks(section)
    import lm_eval

    with _vllm_by_either_name():
        importlib.import_module("lm_eval.models.vllm_causallms")
    manager = _manager(section)

    evaluation: Any = lm_eval.simple_evaluate(
        model="vllm",
        model_args=_model(config, section, policy),
        tasks=_specs(section, manager),
        num_fewshot=section.num_fewshot,
        limit=section.limit,
        apply_chat_template=section.apply_chat_template,
        fewshot_as_multiturn=section.apply_chat_template,
        gen_kwargs=dict(section.gen_kwargs) or None,
        task_manager=manager,
        random_seed=config.seed,
        numpy_random_seed=config.seed,
        torch_random_seed=config.seed,
        fewshot_random_seed=config.seed,
        log_samples=False,
    )
    results = {key: evaluation[key] for key in RESULT_KEYS if evaluation.get(key)}
    write_json(output, {"policy": digest, "evaluated": name, "lm_eval": lm_eval.__version__, **results})
    for task, metrics in results["results"].items():
        say(f"{name}: {task}: {line_of(metrics)}")


def line_of(metrics: JSON) -> str:
    """The numbers of a task; a metric is named with the filter of answers that it is of, unless that is `none`."""
    numbers = {key.removesuffix(",none"): value for key, value in metrics.items() if isinstance(value, float)}
    return ", ".join(f"{key.replace(',', ' ')} {value:.4g}" for key, value in numbers.items())


def section_of(config: Config) -> Harness:
    """The section `evaluation.harness`.

    Raises:
        UserError: it is not set, or lm-eval cannot be imported.
    """
    if config.evaluation.harness is None:
        raise UserError("evaluation.harness is not set; name its tasks")
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        why = f"evaluation.harness needs lm-eval, which cannot be imported ({error}); run `make setup`"
        raise UserError(why) from error
    return config.evaluation.harness


def _manager(section: Harness) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=section.include_path)


@contextmanager
def _vllm_by_either_name() -> Iterator[None]:
    """Gives the version of `vllm-cpu` for `vllm` in the block: lm-eval looks it up on import, and the CPU build of vLLM
    is the distribution `vllm-cpu`.
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

    importlib.metadata.version = version
    try:
        yield
    finally:
        importlib.metadata.version = original


def _specs(section: Harness, manager: Any) -> list[str | JSON]:
    """The tasks in lm-eval's form; a mapping overrides keys of the task with its name, if lm-eval has one."""
    from lm_eval.tasks._yaml_loader import load_yaml

    def override(changes: JSON) -> JSON:
        entry = manager.task_index.get(str(changes.get("task")))
        return {**load_yaml(entry.yaml_path), **changes} if entry is not None else changes

    return [task if isinstance(task, str) else override(task) for task in section.tasks]


def load_tasks(section: Harness) -> set[str]:
    """Loads the tasks with their data.

    Returns:
        Their names.

    Raises:
        UserError: lm-eval does not know a task, or its data is missing.
    """
    from lm_eval.tasks import get_task_dict

    try:
        manager = _manager(section)
        return {str(name) for name in get_task_dict(_specs(section, manager), manager)}
    except Exception as error:
        names = ", ".join(task if isinstance(task, str) else str(task.get("task")) for task in section.tasks)
        reason = one_line(error)
        raise UserError(
            f"evaluation.harness.tasks: {names} cannot be loaded ({type(error).__name__}: {reason}); check the names, "
            "and fetch their data with the stage stage-harness where there is internet"
        ) from error


def _model(config: Config, section: Harness, policy: Policy) -> dict[str, Any]:
    """vLLM's options in the form of lm-eval's backend."""
    on_gpu = devices.device_type() == "cuda"
    arguments: dict[str, Any] = {
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
        longest = section.max_model_len or model_dims.context(policy.config)
        parallel, share = config.vllm.tensor_parallel_size, config.vllm.gpu_memory_utilization
        sizes = (policy, config.model.dtype, visible_gpu(parallel), share, parallel)
        arguments |= engine_size.gpu_settings(*sizes, longest) if longest else {"gpu_memory_utilization": share}
    if policy.is_adapter:
        arguments |= {"lora_local_path": str(policy), **adapters.settings(policy)}
    return arguments
