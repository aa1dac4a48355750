"""Checks by content that this run made the inputs of its stages. Names cannot tell, since runs may share files.

Tables have the run's seed in their footers, policies and trainer states in their manifests. Tables also record the
configuration keys that decided them. Prompts and policies identify the assets that they were made from by content. A
round's train.parquet names the policy and the metrics that the round's update wrote. Files of older versions, which
lack a fact or a key, are not checked for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.files import SEAL
from rloo_pipeline.artifacts.manifest import MANIFEST, Manifest
from rloo_pipeline.errors import UserError, one_line, raise_unless_missing
from rloo_pipeline.runtime import late_files
from rloo_pipeline.runtime.reproducible import CARD

if TYPE_CHECKING:
    from rloo_pipeline.config import Config

ASSETS = "assets.json"
"""Name of the file in the assets folder."""
TRAIN = "train.parquet"
"""Table that an update writes into its round's folder."""
FUNCTIONS = "functions"
"""Footer key: a digest of the code of each of the user's reward functions, as JSON; comments do not count."""
REWARD_MODELS = "reward_models"
"""Footer key: the digest of the manifest of each reward model that the run has trained, as JSON."""
REWARD_FILES = "reward_model_files"
"""Footer key: what identifies the files of each reward model that the run has not trained, as JSON."""
DECIDED = "decided"
"""Footer key: what decided the table, as JSON: the stage, the one reward function that ran or null, and the stage's
parameters."""
UNKNOWN = object()
"""The value of a key that a table or a configuration does not have."""
REMEDY = "restore this run's own, or delete it and run again"


def require_own(seed: int, inputs: Iterable[Path], cards: Mapping[str, str] = MappingProxyType({})) -> None:
    """Checks that this run made the inputs of a stage.

    Args:
        seed: the run's seed.
        inputs: files and folders; unreadable ones are skipped, since the stage itself reports them.
        cards: facts of this stage about its card (`runtime/reproducible.py`).

    Raises:
        UserError: one was made by a run with a different seed, two were made from different assets, or one was made on
            a different kind of card.
    """
    made_from: dict[str, Path] = {}
    for path in inputs:
        facts = facts_of(path)
        if facts.get("seed", str(seed)) != str(seed):
            raise UserError(
                f"{path}: made by another run, with seed {facts['seed']}, but this run has seed {seed}; {REMEDY}"
            )
        for role in cards.keys() & facts.keys():
            if facts[role] != cards[role]:
                raise UserError(
                    f"{path}: made on {facts[role]}, but this machine has {cards[role]}, which computes different "
                    "bytes; run it on the same kind of card, or begin a run with reproducible: false"
                )
        if assets := facts.get("assets"):
            made_from.setdefault(assets, path)
    if len(made_from) > 1:
        first, second = list(made_from.values())[:2]
        raise UserError(
            f"{second}: made by another run, from a different model or different data than {first}; {REMEDY}"
        )


def decided(config: Config, stage: str, only: str | None = None) -> dict[str, str]:
    """The fact `DECIDED` for the tables of a stage; `only` names the one reward function that runs."""
    return {DECIDED: json.dumps([stage, only, _params(config, stage, only)], sort_keys=True)}


def require_configured(config: Config, inputs: Iterable[Path]) -> None:
    """Checks that a run's whole configuration is the one that its tables were made with.

    Raises:
        UserError: a table was made with a different value of a key that decides it, or a different reward weight.
    """
    for path in inputs:
        if other := other_key(config, path):
            raise UserError(f"{path}: {other}; {REMEDY}")


def other_key(config: Config, path: Path) -> str | None:
    """The first difference between a configuration and the one that a table was made with, in words."""
    from rloo_pipeline.artifacts import tables

    facts = facts_of(path)
    try:
        stage, only, before = json.loads(facts.get(DECIDED, '["gate", null, {}]'))
    except ValueError:  # the file is damaged, which the stage that reads it reports
        return None
    from rloo_pipeline.config.run import ADDED_KEYS  # lazily: a step without DeepSpeed lacks pydantic
    from rloo_pipeline.config.section import flatten

    made, now = flatten(before), flatten(json.loads(json.dumps(_params(config, stage, only))))
    # `params` has such keys only if they differ from their defaults
    added = {name: default for name, default in ADDED_KEYS.items() if name in made or name in now}
    made, now = added | made, added | now
    weights = {reward.column: reward.weight for reward in config.rewards}
    stated = json.loads(facts.get(tables.WEIGHTS, "{}"))
    made |= {f"weight of {name}": weight for name, weight in stated.items()}
    now |= {f"weight of {name}": weights.get(name) for name in stated}
    for key in made | now:
        (name, before), (other, after) = _value(made, key), _value(now, key)
        if UNKNOWN not in (before, after) and before != after:
            if name != other:
                return _difference(name, before, after, f"{other} ")
            return _difference(*_innermost(name, before, after))
    return None


def _value(keys: Mapping[str, Any], key: str) -> tuple[str, Any]:
    """A dotted key, or a section around it that is null, with its value; UNKNOWN if a version has neither."""
    names = [*accumulate(key.split("."), "{}.{}".format)]
    return next(((name, keys[name]) for name in reversed(names) if name in keys), (key, UNKNOWN))


def _difference(key: str, made: Any, now: Any, other: str = "") -> str:
    """Two values of a key in words; `other` is the key of the second if it is not the same, and a space."""
    first, second = ("" if value is UNKNOWN else one_line(json.dumps(value), 60) for value in (made, now))
    if first == second:  # they differ only further on
        return f"made with another value of {key}"
    before = f"made with {key} {first}" if first else f"made without {key}"
    return f"{before}, but this run {f'has {other}{second}' if second else 'does not set it'}"


def _innermost(key: str, made: Any, now: Any) -> tuple[str, Any, Any]:
    """The first part of two unequal values that differs, such as one option of a reward, with its path."""
    if isinstance(made, list) and isinstance(now, list) and len(made) == len(now):
        index = next(index for index, pair in enumerate(zip(made, now, strict=True)) if pair[0] != pair[1])
        return _innermost(f"{key}[{index}]", made[index], now[index])
    if isinstance(made, dict) and isinstance(now, dict):
        both = {name: (made.get(name, UNKNOWN), now.get(name, UNKNOWN)) for name in made | now}
        name = next(name for name, values in both.items() if values[0] != values[1])
        return _innermost(f"{key}.{name}", *both[name])
    return key, made, now


def _params(config: Config, stage: str, only: str | None) -> dict[str, Any]:
    """The keys that decide a stage, or its job with a single reward function, whose weight then does not count."""
    if only is None:
        return config.params(stage)
    [reward] = [reward.decides() for reward in config.rewards if reward.column == only] or [{}]
    return {key: value for key, value in reward.items() if key != "weight"}


def require_one_scoring(files: Iterable[Path]) -> None:
    """Checks that tables were scored by the same functions, so that their scores can be compared.

    Raises:
        UserError: the user's functions were edited in between, or a reward model was trained again or replaced.
    """
    versions: dict[str, tuple[object, Path]] = {}
    for path in files:
        facts = facts_of(path)
        of_run = tuple(facts.get(key, "") for key in (FUNCTIONS, REWARD_MODELS))
        # the columns whose reward model a table names; those of earlier releases name none
        scored_by = json.loads(facts.get(REWARD_FILES, "{}")) | ({"": of_run} if any(of_run) else {})
        for name, version in scored_by.items():
            other, first = versions.setdefault(name, (version, path))
            if other != version:
                raise UserError(
                    f"{first} and {path} were scored by different versions of your reward functions or models, so "
                    "they cannot be compared; delete one of them and run again"
                )


def round_folder(run: Path, number: int) -> Path:
    """The folder of a round, in the run's folder."""
    return run / "rounds" / f"{number:05d}"


def facts_of_round(run: Path, number: int) -> dict[str, str]:
    """Lineage facts of the table that a round's update wrote."""
    return facts_of(round_folder(run, number) / TRAIN)


def facts_of(path: Path) -> dict[str, str]:
    """Lineage facts of a table, a folder with a manifest, or an assets folder; empty if it cannot be read."""
    try:
        if late_files.exists(path) and path.is_dir():
            about = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["about"]
            about |= {"assets": assets_digest(path)} if (path / ASSETS).exists() else {}
        elif path.suffix == ".parquet":
            from rloo_pipeline.artifacts import tables

            about = tables.facts_in(path)
        else:
            about = {}
        return {key: str(value) for key, value in about.items() if value is not None}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise_unless_missing(error, path)  # else the facts would be missing in what is written next
        return {}


def assets_digest(folder: Path) -> str:
    """Digest of the content of a run's model and data, whatever their paths."""
    sources: Mapping[str, Any] = json.loads((folder / ASSETS).read_text(encoding="utf-8"))
    built = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    content = {key: _content(source) for key, source in sources.items() if key != SEAL}
    content["built"] = {name: entry for name, entry in built.items() if name != ASSETS}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _content(source: Mapping[str, Any]) -> object:
    """Content of a source: the digests of its files, a commit, or the name of a generator."""
    path = str(source["path"])
    return source["files"] or source["revision"] or (path if ":" in path else "")


def check_policy(folder: Path, digest: str) -> None:
    """Checks that a policy is the one that its round's update wrote.

    Args:
        folder: `policies/<round>`.

    Raises:
        UserError: the digest differs from what the update recorded.
    """
    table = round_folder(folder.parent.parent, int(folder.name)) / TRAIN
    if int(folder.name) and (written := facts_of(table).get("policy", digest)) != digest:
        raise UserError(
            f"{folder}: not the policy that round {int(folder.name)} of this run trained (its digest is {digest[:16]}, "
            f"but {table} names {written[:16]}); restore that policy, or delete {table.parent} and run again"
        )


def named_policy(run: Path, number: int) -> dict[str, str]:
    """The fact `policy` that files about a policy of this training have: an earlier training of the run can have left
    others with the same seed. Empty if no table names the policy: its update's, or for policy 0 the first rollouts.
    """
    facts = facts_of(round_folder(run, max(number, 1)) / (TRAIN if number else "rollouts/000.parquet"))
    return {"policy": facts["policy"]} if "policy" in facts else {}


def check_metrics(file: Path, content: Mapping[str, object]) -> None:
    """Checks that a round's metrics.json is the one that its update wrote.

    Args:
        file: metrics.json.
        content: what the file holds, without its seal.

    Raises:
        UserError: the digest differs from what the update recorded.
    """
    table = file.with_name(TRAIN)
    if facts_of(table).get("metrics", metrics_digest(content)) != metrics_digest(content):
        raise UserError(f"{file}: not the metrics of the update that wrote {table}; {REMEDY}")


def of_policy(seed: int, parent: Manifest | None, digest: str, cards: Mapping[str, str]) -> dict[str, Any]:
    """Facts for the manifest of a policy that was trained from the one with this manifest and digest."""
    return {"seed": seed, "assets": parent and parent.about.get("assets"), "parent": digest, **cards}


def cards_of(inputs: Iterable[Path]) -> dict[str, str]:
    """Facts about cards in a stage's inputs."""
    return {key: fact for path in inputs for key, fact in facts_of(path).items() if key.endswith(CARD)}


def of_metrics(metrics: Mapping[str, object], scores: Path) -> dict[str, str]:
    """Facts for the table of a round's update: digests of its metrics, and of the functions and reward models that gave
    its scores.
    """
    scored_by = {key: fact for key, fact in facts_of(scores).items() if key in (FUNCTIONS, REWARD_MODELS, REWARD_FILES)}
    return {"metrics": metrics_digest(metrics), **scored_by}


def metrics_digest(metrics: Mapping[str, object]) -> str:
    """Digest of a round's metrics."""
    return hashlib.sha256(json.dumps(metrics, sort_keys=True).encode()).hexdigest()
