"""One sentence for a configuration that pydantic refuses: which key is wrong, and what to write instead."""

from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rloo_pipeline.config.run import Config
from rloo_pipeline.config.section import S, Section, section_in
from rloo_pipeline.errors import UserError, did_you_mean

MEANINGS = (
    ("gpus_per_node", "deepspeed.processes is the number of GPUs of an update, deepspeed.nodes that of its nodes"),
    ("gpus", "deepspeed.processes is the number of GPUs of an update, vllm.tensor_parallel_size that of a rollout"),
    ("model_name_or_path", "the model is model.name_or_path"),
    ("run_name", "the name of a run is `run`"),
    ("output_dir", "all files of a run are in results/<run>/, where `run` is its name"),
    ("max_steps num_train_epochs total_epochs epochs", "the length of a run is `rounds`"),
    ("batch_size train_batch_size rollout_batch_size", "completions of a round are rollout.generation_batch_size"),
    ("n rloo_k n_samples_per_prompt", "the number of completions of a prompt is rollout.num_generations"),
    ("max_new_tokens max_response_length response_length", "the longest completion is rollout.max_completion_length"),
    ("kl_coef kl_loss_coef init_kl_coef", "the KL coefficient is algorithm.beta"),
    ("clip_ratio cliprange eps_clip", "the clip range is algorithm.epsilon"),
    ("adv_estimator advantage_estimator", "the estimator is algorithm.advantage"),
    ("grad_clip", "the limit of the gradient's norm is update.max_grad_norm"),
    ("tensor_model_parallel_size", "the number of GPUs of an engine is vllm.tensor_parallel_size"),
    ("logger", "trackers are report_to"),
    (
        "per_device_train_batch_size gradient_accumulation_steps",
        "deepspeed.max_tokens_per_micro_batch bounds the tokens of one forward pass",
    ),
    ("bf16 fp16", "the number format is model.dtype"),
    ("optim", "the optimizer is update.optimizer"),
    ("loss_type", "algorithm.preset names an algorithm such as dapo, algorithm.loss_agg_mode how its loss is averaged"),
    ("scale_rewards", "algorithm.advantage: grpo divides by the standard deviation of the group, dr_grpo does not"),
    ("num_generations_eval", "completions of a held-out prompt are evaluation.num_generations"),
    ("eval_steps", "evaluation.every is the number of rounds between evaluations"),
    ("save_steps save_freq save_total_limit", "keep_every is the number of rounds between policies that are kept"),
    ("reward_funcs", "reward functions are the list `rewards`, each with a key `function`"),
    ("reward_weights", "weights are rewards[].weight"),
    ("train_dataset", "the training rows are dataset.train"),
    ("eval_dataset", "the held-out rows are dataset.eval"),
    ("peft_config", "LoRA is update.lora"),
    ("modules_to_save", "vLLM serves adapters of layers alone, no module that is trained as a whole beside them"),
    ("lmbda", "algorithm.teacher trains on the student's samples alone; demonstrations come first, in warmstart.sft"),
    ("loss_top_k", "the number of tokens of a teacher's distribution is algorithm.teacher.top_k"),
    ("lr actor_learning_rate", "the learning rate is update.learning_rate"),
)
UNKNOWN = ("extra_forbidden", "missing")
"""Types of problems with a key that the section does not have."""
MOST_NAMED = 5
"""Keys that a message names besides the one that it explains."""
KEYS_OF_OTHER_SYSTEMS = {key: meaning for keys, meaning in MEANINGS for key in keys.split()}
"""Keys of TRL, verl, OpenRLHF and others, and what they are called here."""


def checked(section: type[S], raw: Any, origin: str, context: str | None = None) -> S:
    """Validates a mapping as a section or as a whole file.

    Args:
        section: section class that defines the keys.
        raw: the mapping.
        origin: source of the mapping, for the message.
        context: `BY_RUN`, if a run wrote it.

    Raises:
        UserError: a key is unknown, missing or out of range; the message says what to do about one, and names others.
    """
    try:
        return section.model_validate(raw, context=context)
    except ValidationError as error:
        raise UserError(f"{origin}: {_first_problem(error, section)}") from None


def _first_problem(error: ValidationError, whole: type[Section]) -> str:
    """One sentence for the first problem that pydantic found; unknown keys go first because they explain the others.

    Args:
        error: pydantic's error.
        whole: the whole configuration as read.
    """
    problems = sorted(error.errors(), key=lambda one: (one["type"] != "extra_forbidden", _is_mapping_for_text(one)))
    problem, location = problems[0], problems[0]["loc"]
    # the members of a union are one place
    key, *rest = dict.fromkeys(_key_of(one, whole) for one in problems)
    more = f" and {len(rest) - MOST_NAMED} more" if len(rest) > MOST_NAMED else ""
    others = f" (also wrong: {', '.join(filter(None, rest[:MOST_NAMED]))}{more})" if any(rest) else ""
    if problem["type"] == "missing":
        return f"key '{key}' is missing{others}"
    if problem["type"] in UNKNOWN:
        section = _follow(location[:-1], whole)[1]
        suggestion = _suggestion(section, str(location[-1]))
        listing = "" if suggestion or not section else f"; known keys here: {', '.join(section.model_fields)}"
        return f"unknown key '{key}'{suggestion}{others}{listing}"
    section, message = _follow(location, whole)[1], problem["msg"].removeprefix("Value error, ")
    if section is not None and problem["type"] in ("model_type", "dict_type"):
        if problem["input"] is None:
            return f"{key}: the section is empty; give it a key, or leave it out{others}"
        message = f"must be a section with keys of its own ({', '.join(section.model_fields)})"
    value = "" if problem["type"] == "value_error" else f", got {problem['input']!r:.100}"
    if _is_mapping_for_text(problem):
        value += "; quote a string that begins with a brace"
    return f"{key + ': ' if key else ''}{message}{value}{others}"


def _key_of(problem: ErrorDetails, whole: type[Section]) -> str:
    """The key that a problem is about; for an unknown or missing key, that key itself."""
    location = problem["loc"]
    named = [str(location[-1])] if problem["type"] in UNKNOWN else []
    return ".".join([*_follow(location[: len(location) - len(named)], whole)[0], *named])


def _is_mapping_for_text(problem: ErrorDetails) -> bool:
    """True for a mapping in place of a string. Where mappings are allowed, too, another problem says what is wrong."""
    return problem["type"] == "string_type" and isinstance(problem["input"], dict)


def _follow(location: tuple[int | str, ...], whole: type[Section]) -> tuple[list[str], type[Section] | None]:
    """The keys in a pydantic error location, without the union members that pydantic puts between them, and the section
    that it points into, if it does.
    """
    keys: list[str] = []
    section: type[Section] | None = whole
    is_name = False  # as in a mapping of names to sections
    for part in location:
        field = section.model_fields.get(part) if section and isinstance(part, str) and not is_name else None
        if isinstance(part, int) or field or is_name:
            keys.append(str(part))
        if isinstance(part, str) and not is_name:
            section = section_in(field.annotation) if field else None
        is_name = field is not None and get_origin(field.annotation) is dict
    return keys, section


def _suggestion(section: type[Section] | None, unknown: str) -> str:
    """Suggests a known key for an unknown one: by its meaning in other systems, but in a section that the meaning does
    not name first a similar key; else a similar key of the section, the same key of another section, or a less similar
    key of the section; in this order.
    """
    if ":" in unknown:
        return "; YAML needs a space after the colon"
    fields = list(section.model_fields) if section else []
    if meaning := KEYS_OF_OTHER_SYSTEMS.get(unknown):
        named = (section_in(field.annotation) for name, field in Config.model_fields.items() if f"{name}." in meaning)
        is_elsewhere = section not in (None, Config, *named)
        return (did_you_mean(unknown, fields) if is_elsewhere else "") or f"; {meaning}"
    return did_you_mean(unknown, fields, 0.8) or _in_other_section(section, unknown) or did_you_mean(unknown, fields)


def _in_other_section(section: type[Section] | None, unknown: str) -> str:
    models = {name: section_in(field.annotation) for name, field in Config.model_fields.items()}
    others = {name: model for name, model in models.items() if model and model is not section}
    holders = [name for name, model in others.items() if unknown in model.model_fields]
    paths = " or ".join(f"'{name}.{unknown}'" for name in holders)
    return f"; did you mean {paths}?" if len(holders) in (1, 2) else ""
