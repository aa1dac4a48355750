"""Stages that score get the run's own reward model only as it was trained and measured."""

from pathlib import Path

import pytest
from helpers import mini

from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.policy import seal
from rloo_pipeline.cli.stage_options import with_reward_model
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError

USED = {"function": "rloo_pipeline.rewards.model:reward_model"}
CONFIG = Config(**mini(reward_model={"train": {"path": "pairs.jsonl"}}, rewards=[USED, *mini()["rewards"]]))


def made(folder: Path) -> Path:
    """The checks.json of a reward model of two files."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    write_json(folder / "checks.json", {"policy": seal(model, "model", seed=1)})
    return folder / "checks.json"


def test_the_reward_scores_with_the_model_beside_the_checks(tmp_path) -> None:
    config = with_reward_model(CONFIG.only("score"), made(tmp_path))
    assert config.rewards[0].options == {"model": str(tmp_path / "model")}
    assert with_reward_model(CONFIG, None) is CONFIG


def test_a_model_that_is_damaged_or_another_one_is_refused(tmp_path) -> None:
    checks = made(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other!!")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        with_reward_model(CONFIG, checks)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    write_json(checks, {"policy": "of another"})
    with pytest.raises(UserError, match=r"checks\.json: its policy is"):
        with_reward_model(CONFIG, checks)
