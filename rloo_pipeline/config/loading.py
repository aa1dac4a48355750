"""Reading a configuration: nothing is merged or guessed, and an error names the key and its cure in one sentence."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import Field, ValidationError

from rloo_pipeline.config import Config, Reward, Section
from rloo_pipeline.errors import UserError, did_you_mean

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same in C, where PyYAML was built with it: an eighth of the time, which every stage takes."""
NOT_OURS = {
    "gpus_per_node": "deepspeed.processes is the number of GPUs of an update, deepspeed.nodes that of its nodes",
    "gpus": "deepspeed.processes is the number of GPUs of an update, vllm.tensor_parallel_size that of a rollout",
    "model_name_or_path": "the model is model.name_or_path",
    "output_dir": "everything lies in results/<run>/, and `run` is that name",
    "max_steps": "the length of a run is `rounds`",
    "num_train_epochs": "the length of a run is `rounds`",
    "epochs": "the length of a run is `rounds`",
    "batch_size": "rollout.generation_batch_size is the number of completions of a round",
    "per_device_train_batch_size": "deepspeed.max_tokens_per_micro_batch bounds what goes through the model at once",
    "gradient_accumulation_steps": "deepspeed.max_tokens_per_micro_batch bounds what goes through the model at once",
    "bf16": "the number format is model.dtype",
    "fp16": "the number format is model.dtype",
    "reward_funcs": "reward functions are the list `rewards`, each with a key `function`",
    "reward_weights": "weights are rewards[].weight",
    "train_dataset": "the training rows are dataset.train",
    "eval_dataset": "the held-out rows are dataset.eval",
    "peft_config": "LoRA is update.lora",
    "lr": "the learning rate is update.learning_rate",
}
"""Keys that other systems have, and what they are here."""


class Asked(NamedTuple):
    """A configuration as a person names it to a command: a file, and keys that are changed as Snakemake's option
    `--config` changes them.
    """

    file: Path
    changes: Sequence[str] = ()

    @property
    def config(self) -> Config:
        """What it comes to.

        Raises:
            UserError: the file is missing, not YAML, or a key is unknown, missing or out of range.
        """
        return load(self.file, self.changes)

    @property
    def words(self) -> str:
        """The same for Snakemake's command line."""
        given = ["--configfile", str(self.file)]
        return shlex.join([*given, "--config", *self.changes] if self.changes else given)


class Rewards(Section):
    """A file with nothing but reward functions, as `rloo rescore` takes one."""

    rewards: list[Reward] = Field(min_length=1)
    """As in the configuration of a run."""


def load(path: Path, changes: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file, with some keys changed: `rounds=20`, `rollout={shards: 4}`.

    Raises:
        UserError: the file is missing, not YAML, or a key in it is unknown, missing, given twice or out of range.
    """
    return _config_in(_text(path), str(path), tuple(changes))


@lru_cache(maxsize=1)
def _config_in(text: str, origin: str, changes: tuple[str, ...]) -> Config:
    """A worker reads the same one for stage after stage."""
    raw = _parsed(text, origin)
    for change in changes if isinstance(raw, Mapping) else ():
        key, equals, value = change.partition("=")
        if not equals:
            raise UserError(f"--config {change}: write it as KEY=VALUE, such as rounds=20")
        raw = _laid_over(raw, {key: _parsed(value, f"--config {change}")})
    return validate(raw, origin)


def _laid_over(raw: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with some keys changed, sections key by key, as Snakemake does it."""
    made = dict(raw)
    for key, value in change.items():
        both = isinstance(value, Mapping) and isinstance(made.get(key), Mapping)
        made[key] = _laid_over(made[key], value) if both else value
    return made


def look_at(files: Iterable[Path]) -> None:
    """Looks for what whoever else reads these YAML files passes over.

    Raises:
        UserError: a key stands twice in one mapping.
    """
    for file in files:
        if file.suffix != ".json":
            _parsed(_text(file), str(file))


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
        near = did_you_mean(path.name, (file.name for file in path.parent.glob("*.y*ml")))
        raise UserError(f"{path}: no such configuration file{near}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not UTF-8; save the file in that encoding") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a configuration ({error.strerror})") from None


def _parsed(text: str, origin: str) -> Any:
    """What the text of a YAML file holds.

    Raises:
        UserError: it is not YAML, or a key stands twice in one mapping.
    """
    try:
        loader = _LOADER(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_twice(node, origin, set())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else 0
        tabs = "\t" in (text.splitlines() or [""])[min(line, text.count("\n"))]
        cure = "indent with spaces, not tabs" if tabs else "see the indentation, colons and brackets there and above"
        raise UserError(f"{origin}, line {line + 1}: not valid YAML: {error.problem}; {cure}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from error


def _refuse_twice(node: yaml.Node, origin: str, seen: set[int]) -> None:
    """YAML takes the last of two equal keys without a word."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_twice(value, origin, seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in lines:
                    both = f"lines {lines[key.value]} and {line}"
                    raise UserError(f"{origin}: key '{key.value}' stands twice, in {both}; take one out")
                lines[key.value] = line
            _refuse_twice(value, origin, seen)


def validate(raw: object, origin: str) -> Config:
    """The configuration in a mapping that came from `origin`.

    Raises:
        UserError: a key is unknown, missing or out of range; the message names the first such key and its cure.
    """
    if not isinstance(raw, Mapping):
        raise UserError(f"{origin}: the configuration must be a mapping, lines of `key: value`; it has none")
    try:
        return Config.model_validate(dict(raw))
    except ValidationError as error:
        raise UserError(f"{origin}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    """One sentence for the first thing that pydantic found; unknown keys come first, since they explain the others."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    key = ".".join(map(str, _keys(problem["loc"], named=problem["type"] in ("extra_forbidden", "missing"))))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        section, word = _section_at(problem["loc"][:-1]), str(problem["loc"][-1])
        near = _nearest(section, word)
        where = "" if near else f"; known keys here: {', '.join(section.model_fields)}" if section else ""
        return f"unknown key '{key}'{near}{where}{more}"
    if problem["type"] == "missing":
        return f"key '{key}' is missing{more}"
    message = problem["msg"].removeprefix("Value error, ")
    section = _section_at(problem["loc"]) if problem["type"] in ("model_type", "dict_type") else None
    if section is not None and problem["input"] is None:
        return f"{key}: the section is empty; give it a key, or leave it out{more}"
    if section is not None:
        message = f"must be a section with keys of its own ({', '.join(section.model_fields)})"
    got = "" if problem["type"] == "value_error" else f", got {problem['input']!r:.100}"
    return f"{key + ': ' if key else ''}{message}{got}{more}"


def _keys(location: tuple[int | str, ...], named: bool) -> Iterator[int | str]:
    """A pydantic error location without the members of unions that stand in it beside keys.

    Args:
        location: of the problem.
        named: whether its last part is a key in any case, one that is unknown or missing.
    """
    section: type[Section] | None = Config
    for place, part in enumerate(location, 1):
        field = section.model_fields.get(part) if section and isinstance(part, str) else None
        if isinstance(part, int) or field or (named and place == len(location)):
            yield part
        if isinstance(part, str):
            section = _model_in(field.annotation) if field else None


def _nearest(section: type[Section] | None, word: str) -> str:
    """What may have been meant by an unknown key: one of the section that is spelt nearly so, one of that name in
    another section, or one of the section that is somewhat like it.
    """
    here = list(section.model_fields) if section else []
    return did_you_mean(word, here, 0.8) or _elsewhere(section, word) or did_you_mean(word, here)


def _elsewhere(section: type[Section] | None, word: str) -> str:
    """The keys that have this name in other sections, where there are few."""
    if word in NOT_OURS:
        return f"; {NOT_OURS[word]}"
    named = {name: _model_in(field.annotation) for name, field in Config.model_fields.items()}
    there = [name for name, model in named.items() if model and model is not section and word in model.model_fields]
    found = " or ".join(f"'{name}.{word}'" for name in there)
    return f"; did you mean {found}?" if len(there) in (1, 2) else ""


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
