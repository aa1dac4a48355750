"""Reads a configuration file. Nothing is merged or guessed; an error names the key and says what to change."""

import functools
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import Field

from rloo_pipeline.config import Config, Reward, Section
from rloo_pipeline.config.error_messages import checked
from rloo_pipeline.config.section import BY_RUN, JSON, merge
from rloo_pipeline.errors import UserError, did_you_mean, raise_disk_error
from rloo_pipeline.runtime.installation import DEFAULT_CONFIG, NO_PROJECT

SEAL = "# blake2b of the lines below: "
_LOADER = type(
    "Loader",
    (getattr(yaml, "CSafeLoader", yaml.SafeLoader),),
    {"yaml_constructors": {**yaml.SafeLoader.yaml_constructors}},
)
"""PyYAML's C loader, if it was built: it takes an eighth of the time, and every stage loads the configuration. Its
constructors are its own, since lm-format-enforcer, which vLLM imports, makes PyYAML's read dates as strings.
"""


class ConfigArguments(NamedTuple):
    """The configuration on a command line: a file, and changed keys as with Snakemake's `--config`."""

    file: Path
    changes: Sequence[str] = ()

    @property
    def config(self) -> Config:
        """Loads the file and applies the changes.

        Raises:
            UserError: the file is missing or not YAML, or a key is unknown, missing or out of range.
        """
        return load(self.file, self.changes)

    @property
    def run_command(self) -> str:
        """The command that runs the same configuration, quoted for a shell."""
        file = [] if self.file == DEFAULT_CONFIG else [str(self.file)]
        return shlex.join(["rloo", "run", *file, *(["--config", *self.changes] if self.changes else [])])


class RewardsFile(Section):
    """A file with nothing but reward functions, for `rloo rescore`."""

    rewards: list[Reward] = Field(min_length=1)
    """Reward functions, as in the configuration of a run."""


def load(path: Path, changes: Sequence[str] = ()) -> Config:
    """Loads a configuration from a YAML file.

    Args:
        path: the file.
        changes: keys to change, as in `rounds=20` or `rollout={shards: 4}`.

    Raises:
        UserError: the file is missing, damaged or not YAML, or a key is unknown, missing, duplicated or out of range.
    """
    text = _read(path)
    return _load_text(_unsealed(text, path), str(path), tuple(changes), by_run=text.startswith(SEAL))


def sealed(text: str) -> str:
    """Prepends a comment line with the digest of the text, for a configuration that a run writes."""
    return f"{SEAL}{hashlib.blake2b(text.encode(), digest_size=32).hexdigest()}\n{text}"


def _unsealed(text: str, path: Path) -> str:
    """Checks the digest line and returns the text without it; text without such a line is returned unchanged.

    Raises:
        UserError: the digest differs.
    """
    first, _, rest = text.partition("\n")
    if not first.startswith(SEAL):
        return text
    if sealed(rest) != text:
        raise UserError(
            f"{path} was changed since the run wrote it (blake2b differs); delete it and run again, or, if the change "
            "is yours, delete its first line"
        )
    return rest


@functools.lru_cache(maxsize=1)  # a worker process loads the same text for every stage
def _load_text(text: str, origin: str, changes: tuple[str, ...], by_run: bool) -> Config:
    raw = _parse_file(text, origin)
    require_one_run(raw, origin)
    whole = merge(_require_mapping(raw, origin), read_changes(changes))
    try:
        return checked(Config, whole, origin, BY_RUN if by_run else None)
    except UserError as error:
        if not by_run or changes:
            raise
        why = str(error).removeprefix(f"{origin}: ").partition(";")[0]  # advice after it is for who writes a file
        raise UserError(
            f"{origin}: this version of the package cannot read it ({why}), but the one that wrote it can: the run's "
            "tables name its commit in their footers (package_version)"
        ) from None


def is_experiment(raw: object) -> bool:
    """True if a mapping looks like an experiment and not like the configuration of one run."""
    return isinstance(raw, Mapping) and "base" in raw


def require_one_run(raw: Any, origin: str) -> None:
    """Checks that a mapping is not an experiment.

    Raises:
        UserError: it is an experiment.
    """
    if is_experiment(raw):
        raise UserError(
            f"{origin}: an experiment of several runs, where one run is needed; name its configuration, such as "
            f"that of its base, {raw['base']}"
        )


def read_mapping(path: Path, changes: Sequence[str] = ()) -> JSON:
    """Reads the mapping in the YAML file of a run or an experiment.

    Args:
        path: the file.
        changes: as for `load`.

    Raises:
        UserError: the file is missing, not YAML, or not a mapping.
    """
    return merge(_require_mapping(_parse_file(_read(path), str(path)), str(path)), read_changes(changes))


def read_changes(changes: Iterable[str]) -> JSON:
    """Parses the changes of `--config`. Values are parsed as in a file, whereas Snakemake itself turns each number,
    boolean and null inside a section into text.

    Raises:
        UserError: a change is not KEY=VALUE, or its value is not YAML.
    """
    read: JSON = {}
    for change in changes:
        key, value = split_change(change)
        read = merge(read, {key: _parse(value, f"--config {change}")})
    return read


def split_change(change: str) -> tuple[str, str]:
    """Splits a change on the command line into key and value.

    Raises:
        UserError: it has no value, or dots in its key, which Snakemake refuses with a traceback.
    """
    key, equals, value = change.partition("=")
    if not equals and is_yaml_name(change):
        raise UserError(
            f"--config {change}: --config takes KEY=VALUE; name a file before the options, or with --configfile"
        )
    if not equals:
        raise UserError(f"--config {change}: write it as KEY=VALUE, such as rounds=20")
    first, *rest = key.split(".")
    if rest:
        nested = functools.reduce(lambda inner, name: f"{{{name}: {inner}}}", reversed(rest), value)
        raise UserError(f"--config {change}: write a key of a section as --config '{first}={nested}'")
    return key, value


def is_yaml_name(word: str) -> bool:
    """True if a word on a command line names a YAML file."""
    return word.endswith((".yaml", ".yml"))


def refuse_bad_files(files: Iterable[Path]) -> None:
    """Checks that configuration files can be parsed. Snakemake also reads them, but its errors do not name the file,
    and it silently keeps only the last of duplicate keys.

    Raises:
        UserError: a file is missing, not YAML or JSON, not a mapping, or has a key twice in one mapping.
    """
    for file in files:
        read_mapping(file)


def load_rewards(path: Path, run: Config) -> list[Reward]:
    """Loads the list `rewards` from a YAML file and validates it as part of the configuration `run`.

    Raises:
        UserError: the file is missing or not YAML, or a key is unknown, missing or out of range.
    """
    raw = _parse(_read(path), str(path))
    if not isinstance(raw, Mapping):
        raise UserError(f"{path}: must be a mapping with a list `rewards`")
    rewards = checked(RewardsFile, dict(raw), str(path)).rewards
    # validated again as part of the run, which also checks the names of their columns
    plain = [reward.model_dump(mode="json") for reward in rewards]
    rest = run.model_dump(
        mode="json", exclude={"rewards": True, "correct": True, "evaluation": True, "dataset": {"select"}}
    )
    return checked(Config, {**rest, "rewards": plain}, str(path), BY_RUN).rewards


def reward_from_arguments(function: str, options: str, timeout: float, batch: str) -> Reward:
    """The reward that `rloo reward-test` names on its command line. A row that fails does not stop the others.

    Args:
        function: `module:function` or `file.py:function`.
        options: keyword arguments of the function, as a JSON object.
        timeout: seconds per row.
        batch: the reward's key of the same name.

    Raises:
        UserError: `options` is not JSON, or a value is out of range.
    """
    try:
        keywords = json.loads(options)
    except json.JSONDecodeError as error:
        raise UserError(f"--options: not JSON ({error}); write an object such as '{{\"longest\": 500}}'") from None
    keys = {"function": function, "options": keywords, "timeout": timeout, "batch": batch, "on_error": "none"}
    return checked(Reward, keys, "command line")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        suggestion = did_you_mean(path.name, (file.name for file in path.parent.glob("*.y*ml")))
        if path == DEFAULT_CONFIG:
            suggestion = NO_PROJECT
        raise UserError(f"{path}: no such configuration file{suggestion}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise_disk_error(error, path)
        raise UserError(f"{path}: cannot be read as a configuration ({error.strerror})") from None


def _require_mapping(raw: object, origin: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise UserError(f"{origin}: the configuration must be a mapping, lines of `key: value`; it has none")
    return raw


def _parse_file(text: str, file: str) -> Any:
    """Parses a file as JSON if it is named so, since YAML lacks some of JSON's escapes and numbers, or else as YAML."""
    if not file.endswith(".json"):
        return _parse(text, file)

    def refuse_duplicates(pairs: Sequence[tuple[str, Any]]) -> JSON:
        for key, times in Counter(key for key, _ in pairs).items():
            if times > 1:
                raise UserError(f"{file}: key '{key}' occurs twice; remove one")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=refuse_duplicates)
    except json.JSONDecodeError as error:
        raise UserError(f"{file}, line {error.lineno}: not valid JSON: {error.msg}") from None


def _parse(text: str, origin: str) -> Any:
    """Parses the text of a YAML file.

    Raises:
        UserError: it is not YAML, or a key occurs twice in one mapping.
    """
    try:
        loader = _LOADER(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_duplicates(node, origin, set())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else 0
        lines = text.splitlines() or [""]
        has_tab = "\t" in lines[min(line, len(lines) - 1)]
        fix = "indent with spaces, not tabs" if has_tab else "check indentation, colons and brackets up to there"
        raise UserError(f"{origin}, line {line + 1}: not valid YAML: {error.problem}; {fix}") from error
    except ValueError as error:  # PyYAML reads 2026-02-30 as a date
        raise UserError(f"{origin}: not valid YAML: {error}; put text that looks like a date into quotes") from None
    except yaml.YAMLError as error:
        raise UserError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from error


def flow(value: object) -> str:
    """Formats a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()


def _refuse_duplicates(node: yaml.Node, origin: str, visited: set[int]) -> None:
    if id(node) in visited:  # an alias
        return
    visited.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_duplicates(value, origin, visited)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in lines:
                    both = f"lines {lines[key.value]} and {line}"
                    raise UserError(f"{origin}: key '{key.value}' occurs twice, in {both}; remove one")
                lines[key.value] = line
            _refuse_duplicates(value, origin, visited)


def validate(raw: object, origin: str) -> Config:
    """Validates a mapping as the configuration of a run.

    Args:
        raw: the mapping, as YAML or Snakemake gives it.
        origin: source of the mapping, for the message.

    Raises:
        UserError: a key is unknown, missing or out of range; the message names the first such key and what to do.
    """
    return checked(Config, dict(_require_mapping(raw, origin)), origin)
