"""A new key does not run finished runs again, unless someone has decided that it should."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from helpers import mini

from rloo_pipeline.config import STAGES, Config, run

KEYS = Path(__file__).with_name("finished_runs.yaml")
"""The keys that decide the results of a run without optional sections, by section."""


def keys_in(values: dict[str, Any], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from keys_in(value, f"{before}{name}.")
        else:
            yield before + name


def test_what_decides_a_run_without_a_new_key_is_what_decided_it_before() -> None:
    """Put a new key into `ADDED_KEYS` in config/run.py. If its default changes results, add it to the list here, and
    say in CHANGELOG.md that finished stages run again.
    """
    config = Config(**mini())
    decides: dict[str, set[str]] = {}
    for stage in STAGES:
        for section, value in config.params(stage).items():
            decides.setdefault(section, set()).update(keys_in(value) if isinstance(value, dict) else ())
    assert {section: sorted(keys) for section, keys in decides.items()} == yaml.safe_load(KEYS.read_text())


def test_a_key_that_came_later_changes_no_parameters_of_runs_without_it(monkeypatch) -> None:
    added = {"update.lora.use_rslora": False, "algorithm.teacher.beta": 1.0, "dataset.split_special_tokens": None}
    monkeypatch.setattr(run, "ADDED_KEYS", added)
    teacher = {"beta": 0, "importance_sampling_level": "token", "teacher": {"name_or_path": "x", "top_k": 8}}

    def deciding(rslora: bool, beta: float, split: bool | None) -> list[set[str]]:
        keys = {"update": {"lora": {"use_rslora": rslora}}, "dataset": {"split_special_tokens": split}}
        config = Config(**mini(algorithm=teacher | {"teacher": teacher["teacher"] | {"beta": beta}}, **keys))
        update, prompts = config.params("update"), config.params("prompts")
        return [{*update["update"]["lora"]}, {*update["algorithm"]["teacher"]}, {*prompts["dataset"]}]

    names = [path.rpartition(".")[2] for path in added]
    assert not any(name in keys for name, keys in zip(names, deciding(False, 1.0, None), strict=True))
    assert all(name in keys for name, keys in zip(names, deciding(True, 0.5, False), strict=True))
