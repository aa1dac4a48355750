"""Reading a configuration: nothing is merged or guessed, and an error names the key and its cure in one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from rloo_pipeline.config import Config, Reward, Section
from rloo_pipeline.errors import UserError, did_you_mean

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same in C, where PyYAML was built with it: an eighth of the time, which every stage takes."""
NOT_OURS = {
    "gpus_per_node": "deepspeed.processes is the number of GPUs of an update, deepspeed.nodes that of its nodes",
    "gpus": "deepspeed.processes is the number of GPUs of an update, vllm.tensor_parallel_size that of a rollout",
}
"""Keys that other systems have, and what they are here."""


class Rewards(Section):
    """A file with nothing but reward functions, as `rloo rescore` takes one."""

    rewards: list[Reward] = Field(min_length=1)
    """As in the configuration of a run."""


def load(path: Path) -> Config:
    """The configuration in a YAML file.

    Raises:
        UserError: the file is missing, not YAML, or a key in it is unknown, missing or out of range.
    """
    return _config_in(_text(path), str(path))


@lru_cache(maxsize=1)
def _config_in(text: str, origin: str) -> Config:
    """A worker reads the same one for stage after stage."""
    return validate(_parsed(text, origin), origin)


def load_rewards(path: Path, run: Config) -> list[Reward]:
    """The reward functions in a YAML file with a list `rewards`, as they would be in the configuration of a run.

    Raises:
        UserError: the file is missing, not YAML, or a key in it is unknown, missing or out of range.
    """
    raw = _parsed(_text(path), str(path))
    if not isinstance(raw, Mapping):
        raise UserError(f"{path}: must be a mapping with a list `rewards`")
    try:
        rewards = Rewards.model_validate(dict(raw)).rewards
    except ValidationError as error:
        raise UserError(f"{path}: {_first_problem(error)}") from None
    # names of columns are checked as in a run
    plain = [reward.model_dump(mode="json") for reward in rewards]
    rest = run.model_dump(mode="json", exclude={"rewards", "correct", "evaluation"})
    return validate({**rest, "rewards": plain}, str(path)).rewards


def reward_from_words(function: str, options: str, timeout: float, batch: str) -> Reward:
    """A reward function as the command line names it; a row that fails is shown and does not stop the others.

    Raises:
        UserError: the options are no JSON object, or a value is out of range.
    """
    try:
        found = json.loads(options)
    except json.JSONDecodeError as error:
        raise UserError(f"--options: not JSON ({error}); write an object such as '{{\"longest\": 500}}'") from None
    try:
        return Reward.model_validate(
            {"function": function, "options": found, "timeout": timeout, "batch": batch, "on_error": "none"}
        )
    except ValidationError as error:
        raise UserError(f"rloo reward-test: {_first_problem(error)}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file") from None


def _parsed(text: str, origin: str) -> Any:
    """What the text of a YAML file holds."""
    try:
        return yaml.load(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise UserError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from error


def validate(raw: object, origin: str) -> Config:
    """The configuration in a mapping that came from `origin`.

    Raises:
        UserError: a key is unknown, missing or out of range; the message names the first such key and its cure.
    """
    if not isinstance(raw, Mapping):
        raise UserError(f"{origin}: the configuration must be a mapping of keys")
    try:
        return Config.model_validate(dict(raw))
    except ValidationError as error:
        raise UserError(f"{origin}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    """One sentence for the first thing that pydantic found; unknown keys come first, since they explain the others."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    key = ".".join(str(part) for part in problem["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        section, word = _section_at(problem["loc"][:-1]), str(problem["loc"][-1])
        near = _elsewhere(section, word) or did_you_mean(word, section.model_fields if section else [])
        where = "" if near else f"; known keys here: {', '.join(section.model_fields)}" if section else ""
        return f"unknown key '{key}'{near}{where}{more}"
    if problem["type"] == "missing":
        return f"key '{key}' is missing{more}"
    message = problem["msg"].removeprefix("Value error, ")
    got = "" if problem["type"] == "value_error" else f", got {problem['input']!r}"
    return f"{key + ': ' if key else ''}{message}{got}{more}"


def _elsewhere(section: type[Section] | None, word: str) -> str:
    """The key that has this name in another section, where there is one and it is not in this one."""
    if word in NOT_OURS:
        return f"; {NOT_OURS[word]}"
    named = {name: _model_in(field.annotation) for name, field in Config.model_fields.items()}
    found = [name for name, model in named.items() if model and model is not section and word in model.model_fields]
    return f"; did you mean '{found[0]}.{word}'?" if len(found) == 1 else ""


def _section_at(location: tuple[int | str, ...]) -> type[Section] | None:
    """The model of the section that a pydantic error location points into."""
    section: type[Section] | None = Config
    for part in location:
        if isinstance(part, int) or section is None:
            continue
        field = section.model_fields.get(part)
        section = _model_in(field.annotation) if field else None
    return section


def _model_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in getattr(annotation, "__args__", ()) if (found := _model_in(part))), None)
