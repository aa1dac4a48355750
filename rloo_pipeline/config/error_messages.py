"""One sentence for a configuration that pydantic refuses: which key is wrong, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from rloo_pipeline.config.run import Config
from rloo_pipeline.config.section import Section, section_in
from rloo_pipeline.errors import did_you_mean

KEYS_OF_OTHER_SYSTEMS = {
    "gpus_per_node": "deepspeed.processes is the number of GPUs of an update, deepspeed.nodes that of its nodes",
    "gpus": "deepspeed.processes is the number of GPUs of an update, vllm.tensor_parallel_size that of a rollout",
    "model_name_or_path": "the model is model.name_or_path",
    "output_dir": "all files of a run are in results/<run>/, where `run` is its name",
    "max_steps": "the length of a run is `rounds`",
    "num_train_epochs": "the length of a run is `rounds`",
    "epochs": "the length of a run is `rounds`",
    "batch_size": "rollout.generation_batch_size is the number of completions of a round",
    "per_device_train_batch_size": "deepspeed.max_tokens_per_micro_batch bounds the tokens of one forward pass",
    "gradient_accumulation_steps": "deepspeed.max_tokens_per_micro_batch bounds the tokens of one forward pass",
    "bf16": "the number format is model.dtype",
    "fp16": "the number format is model.dtype",
    "reward_funcs": "reward functions are the list `rewards`, each with a key `function`",
    "reward_weights": "weights are rewards[].weight",
    "train_dataset": "the training rows are dataset.train",
    "eval_dataset": "the held-out rows are dataset.eval",
    "peft_config": "LoRA is update.lora",
    "lr": "the learning rate is update.learning_rate",
}
"""Keys of TRL, transformers and others, and what they are called here."""


def first_problem(error: ValidationError, whole: type[Section] = Config) -> str:
    """One sentence for the first problem that pydantic found; unknown keys go first because they explain the others.

    Args:
        error: of pydantic.
        whole: what was read.
    """
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    key = ".".join(
        map(str, _keys(problem["loc"], ends_with_key=problem["type"] in ("extra_forbidden", "missing"), whole=whole))
    )
    others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        section, unknown = _section_at(problem["loc"][:-1], whole), str(problem["loc"][-1])
        suggestion = _suggestion(section, unknown)
        listing = "" if suggestion or not section else f"; known keys here: {', '.join(section.model_fields)}"
        return f"unknown key '{key}'{suggestion}{listing}{others}"
    if problem["type"] == "missing":
        return f"key '{key}' is missing{others}"
    message = problem["msg"].removeprefix("Value error, ")
    section = _section_at(problem["loc"], whole) if problem["type"] in ("model_type", "dict_type") else None
    if section is not None and problem["input"] is None:
        return f"{key}: the section is empty; give it a key, or leave it out{others}"
    if section is not None:
        message = f"must be a section with keys of its own ({', '.join(section.model_fields)})"
    value = "" if problem["type"] == "value_error" else f", got {problem['input']!r:.100}"
    return f"{key + ': ' if key else ''}{message}{value}{others}"


def _keys(location: tuple[int | str, ...], ends_with_key: bool, whole: type[Section]) -> Iterator[int | str]:
    """The keys in a pydantic error location, without the union members that pydantic puts between them.

    Args:
        location: of the problem.
        ends_with_key: whether the last part is a key even if no field has that name (an unknown or missing key).
        whole: what was read.
    """
    section: type[Section] | None = whole
    for position, part in enumerate(location, 1):
        field = section.model_fields.get(part) if section and isinstance(part, str) else None
        if isinstance(part, int) or field or (ends_with_key and position == len(location)):
            yield part
        if isinstance(part, str):
            section = section_in(field.annotation) if field else None


def _suggestion(section: type[Section] | None, unknown: str) -> str:
    """What an unknown key may stand for: a similar key of the section, the same key of another section, or a less
    similar key of the section; in this order.
    """
    fields = list(section.model_fields) if section else []
    return did_you_mean(unknown, fields, 0.8) or _in_other_section(section, unknown) or did_you_mean(unknown, fields)


def _in_other_section(section: type[Section] | None, unknown: str) -> str:
    if unknown in KEYS_OF_OTHER_SYSTEMS:
        return f"; {KEYS_OF_OTHER_SYSTEMS[unknown]}"
    models = {name: section_in(field.annotation) for name, field in Config.model_fields.items()}
    others = {name: model for name, model in models.items() if model and model is not section}
    holders = [name for name, model in others.items() if unknown in model.model_fields]
    paths = " or ".join(f"'{name}.{unknown}'" for name in holders)
    return f"; did you mean {paths}?" if len(holders) in (1, 2) else ""


def _section_at(location: tuple[int | str, ...], whole: type[Section]) -> type[Section] | None:
    """The section that a pydantic error location points into."""
    section: type[Section] | None = whole
    for part in location:
        if isinstance(part, int) or section is None:
            continue
        field = section.model_fields.get(part)
        section = section_in(field.annotation) if field else None
    return section
