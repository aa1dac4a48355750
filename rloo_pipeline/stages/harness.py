"""harness: tasks of lm-eval on a policy, with its vLLM backend and without network → harness.json.

Prompts, examples and scores are those of lm-eval. Fields of its results that depend on the clock or the host are left
out.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import JSON, Config, Harness
from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.rollout import lm_eval_model
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
        UserError: lm-eval does not know a task, its data is missing, or the policy is incomplete.
    """
    section = section_of(config)
    plain_model.check_tensors(policy)
    digest = policy.digest
    lm_eval_model.prepare(config.vllm)
    manager, _ = load_tasks(config)
    import lm_eval

    seed = config.seed & 0x7FFFFFFF  # NumPy takes at most 32 bits
    evaluation: Any = lm_eval.simple_evaluate(
        model="vllm",
        model_args=lm_eval_model.arguments(config, section, policy),
        tasks=_specs(section, manager),
        num_fewshot=section.num_fewshot,
        limit=section.limit,
        apply_chat_template=section.apply_chat_template,
        fewshot_as_multiturn=section.apply_chat_template,
        system_instruction=config.dataset.system_prompt if section.apply_chat_template else None,
        gen_kwargs=dict(section.gen_kwargs) or None,
        task_manager=manager,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
        log_samples=False,
    )
    results = {key: evaluation[key] for key in RESULT_KEYS if evaluation.get(key)}
    write_json(output, {"policy": digest, "evaluated": name, "lm_eval": lm_eval.__version__, **results})
    for task, metrics in results["results"].items():
        say(f"{name}: {task}: {line_of(metrics)}")


def line_of(metrics: JSON) -> str:
    """The numbers of a task; a metric's name includes its filter of answers, unless that is `none`."""
    numbers = {key.removesuffix(",none"): value for key, value in metrics.items() if isinstance(value, float)}
    return ", ".join(f"{key.replace(',', ' ')} {value:.4g}" for key, value in numbers.items())


def section_of(config: Config) -> Harness:
    """The section `evaluation.harness`.

    Raises:
        UserError: the section is not set.
    """
    if config.evaluation.harness is None:
        raise UserError("evaluation.harness is not set; name its tasks")
    return config.evaluation.harness


def _specs(section: Harness, manager: Any) -> list[str | JSON]:
    """The tasks in lm-eval's form; if lm-eval has a task of the same name, a mapping overrides its keys."""
    from lm_eval.tasks._yaml_loader import load_yaml

    def override(changes: JSON) -> JSON:
        entry = manager.task_index.get(str(changes.get("task")))
        return {**load_yaml(entry.yaml_path), **changes} if entry is not None else changes

    return [task if isinstance(task, str) else override(task) for task in section.tasks]


def load_tasks(config: Config) -> tuple[Any, dict[str, Any]]:
    """Loads the tasks and their data; returns lm-eval's manager of tasks, and the tasks by name.

    Raises:
        UserError: lm-eval does not know a task, its data is missing, or it scores given answers, which cannot be done
            with thinking or with an adapter on the LM head.
    """
    from lm_eval.tasks import TaskManager, get_task_dict

    section = section_of(config)
    try:
        manager = TaskManager(include_path=section.include_path)
        tasks = get_task_dict(_specs(section, manager), manager)
    except Exception as error:
        names = ", ".join(task if isinstance(task, str) else str(task.get("task")) for task in section.tasks)
        reason = one_line(error)
        raise UserError(
            f"evaluation.harness.tasks: {names} cannot be loaded ({type(error).__name__}: {reason}); check the names, "
            "and fetch their data with the stage stage-harness where there is internet"
        ) from error
    choices = [name for name, task in _leaves(tasks) if task.OUTPUT_TYPE != "generate_until"]
    if choices and section.apply_chat_template and config.dataset.chat_template_kwargs.get("enable_thinking"):
        raise UserError(
            f"evaluation.harness.tasks: {choices[0]} scores given answers, which leaves no room for thinking; take "
            "tasks that generate, or set apply_chat_template or dataset.chat_template_kwargs.enable_thinking to false"
        )
    if choices and config.update.lora is not None and config.update.lora.is_on("lm_head"):
        raise UserError(
            f"evaluation.harness.tasks: {choices[0]} scores given answers, for which vLLM leaves out an adapter on "
            "lm_head; take tasks that generate, or leave lm_head out of update.lora.target_modules"
        )
    return manager, {str(name): task for name, task in tasks.items()}


def _leaves(tasks: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The tasks by name, with those of groups."""
    for name, task in tasks.items():
        yield from _leaves(task) if isinstance(task, dict) else ((str(name), task),)
