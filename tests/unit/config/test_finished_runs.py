"""A new key does not run finished runs again, unless someone has decided that it should."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import mini

from rloo_pipeline.config import STAGES, Config
from rloo_pipeline.config.error_messages import REMOVED
from rloo_pipeline.config.loading import load, sealed
from rloo_pipeline.errors import UserError

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


@pytest.mark.parametrize("path", REMOVED)
def test_a_removed_key_gives_a_one_line_error_but_a_finished_run_may_have_it(path: str, tmp_path: Path) -> None:
    section, key = path.split(".")
    config, file = (
        mini(judge={"function": "a.py:b"}, select={}, dataset={"dev": {"path": "a.jsonl"}}),
        tmp_path / "c.yaml",
    )
    value: object = {"timeout_value": 0.5, "train": "auto"}.get(key, 1)
    holder = config[section][0] if section == "rewards" else config.setdefault(section, {})
    holder |= {key: value} | ({"on_timeout": "value"} if key == "timeout_value" else {})
    text = yaml.safe_dump(config)
    file.write_text(text)
    with pytest.raises(UserError, match=rf"c.yaml: key '{section}.*{key}' was removed: {REMOVED[path][:9]}"):
        load(file)
    file.write_text(sealed(text))
    run = load(file)
    if key == "timeout_value":
        assert (run.rewards[0] if section == "rewards" else run.judge).on_timeout == 0.5
