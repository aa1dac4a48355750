"""A reward model that was replaced in its folder is noticed when a call starts, before anything is scored with it."""

import os
import shutil
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import mini

from rloo_pipeline.artifacts import reward_models, tables
from rloo_pipeline.config import Config
from rloo_pipeline.config.rewards import REWARD_MODEL
from rloo_pipeline.config.run_set import RunSet
from rloo_pipeline.errors import UserError
from rloo_pipeline.snakemake_ext import replaced_rewards
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall
from rloo_pipeline.user_code.score_table import scoring_facts

ROW = {"prompt_id": "p", "sample": 0, "scores/judge": 1.0, "reward": 1.0, "seconds": 0.0, "error": None}


@pytest.fixture
def scored(tmp_path) -> Any:
    """A run with a table that a model has scored: the model's folder, the table, and the message about them."""
    model, table = tmp_path / "model", tmp_path / "mini" / "scores.parquet"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = Config(**mini(rewards=[{"function": REWARD_MODEL, "name": "judge", "options": {"model": str(model)}}]))
    tables.write(table, [ROW], tables.scores_schema(["judge"]), "scores", **scoring_facts(config.rewards))
    os.utime(table, (0, 0))  # long before the model's files changed

    def message(runs_again: bool = False, stage: str = "score") -> str | None:
        job = SimpleNamespace(
            rule=SimpleNamespace(shellcmd=f"rloo {stage} --output {{output}}"),
            wildcards=SimpleNamespace(),
            output=[str(table), str(tmp_path / "missing.parquet"), str(model)],
        )
        call = object.__new__(SnakemakeCall)
        call.workflow = SimpleNamespace(dag=SimpleNamespace(jobs=[job], needrun=lambda _: runs_again))
        call.runs = RunSet({"mini": config})
        return replaced_rewards.replaced(call)

    return SimpleNamespace(model=model, table=table, message=message)


def test_a_table_of_the_model_that_was_replaced_is_named(scored) -> None:
    assert scored.message() is None
    (scored.model / "config.json").write_text("[]")
    said = scored.message()
    assert said is not None
    assert said.startswith(f"{scored.model} was replaced after {scored.table} was scored with it")
    assert scored.message(runs_again=True) is None, "the new model scores it"


def test_a_later_table_of_another_reward_hides_no_table_of_the_model_that_was_replaced(scored, tmp_path) -> None:
    later = tmp_path / "missing.parquet"
    tables.write(later, [ROW], tables.scores_schema(["judge"]), "scores", reward_model_files='{"other": "0"}')
    os.utime(later, (1, 1))
    assert scored.message() is None
    (scored.model / "config.json").write_text("[]")
    assert f"was replaced after {scored.table} was scored with it" in (scored.message() or "")


def test_another_folder_with_old_times_in_its_place_is_noticed(scored, tmp_path) -> None:
    other = shutil.copytree(scored.model, tmp_path / "other")
    (other / "config.json").write_text("[]")
    shutil.rmtree(scored.model)
    other.rename(scored.model)
    assert scored.message() is not None


def test_a_model_that_a_run_has_trained_in_place_of_another_is_noticed(scored) -> None:
    (scored.model / "manifest.json").write_text("{}")
    assert scored.message() is not None


@pytest.mark.parametrize("content", [b"", b"1234", struct.pack("<Q", 99) + b"{", struct.pack("<Q", 2) + b"[]"])
def test_a_model_that_is_truncated_is_named(scored, content) -> None:
    (scored.model / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model/model\.safetensors: truncated or damaged .*; fetch or write the model"):
        scored.message()


def test_a_model_that_has_not_changed_since_is_not_read(scored, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the model was read")

    (scored.model / "config.json").write_text("[]")
    os.utime(scored.table, (2**40, 2**40))
    monkeypatch.setattr(reward_models, "version_of", fail)
    assert scored.message() is None


def test_a_table_of_an_earlier_release_and_a_model_that_is_not_here_are_not_checked(scored) -> None:
    shutil.rmtree(scored.model)
    assert scored.message() is None
    scored.model.mkdir()
    tables.write(scored.table, [ROW], tables.scores_schema(["judge"]), "scores")
    os.utime(scored.table, (0, 0))
    assert scored.message() is None
