"""Columns of scores, from results of functions."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloo_pipeline.artifacts import lineage, tables
from rloo_pipeline.artifacts.manifest import MANIFEST
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import REWARD_MODEL, Reward, Scoring
from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code import score_table
from rloo_pipeline.user_code.score_batch import FunctionScores, log_summary

ROLLOUTS = pa.table({"prompt_id": ["a", "a"], "sample": [0, 1]})


def columns(monkeypatch: pytest.MonkeyPatch, notes: list[str | None], **options: Any) -> Any:
    """The columns of a function that reported these reasons for None, which needs neither a policy nor prompts."""
    result = FunctionScores([None, None], [None, None], notes, [0.0, 0.0])
    monkeypatch.setattr(score_table, "batch_of", lambda *_: None)
    pools = SimpleNamespace(rewards=[Reward(function="own.py:judge")], score=lambda *_: [result])
    return score_table.score_columns(pools, ROLLOUTS, None, Policy(Path("policy")), **options)  # type: ignore[arg-type]


def test_a_function_that_fails_on_every_row_is_an_error(monkeypatch) -> None:
    refused: list[str | None] = ["judge was refused with status 400 (no such parameter)"] * 2
    message = (
        r"^reward 'judge' \(own\.py:judge\) could score none of 2 completions: judge was refused with status 400 "
        r"\(no such parameter\); correct its options"
    )
    with pytest.raises(UserError, match=message):
        columns(monkeypatch, refused)
    assert columns(monkeypatch, refused, only_failures=True)["judge"].notes == refused, "further rows may be few"


@pytest.mark.parametrize("notes", [[None, None], [None, "judge was refused"]])
def test_none_for_every_row_is_no_failure(notes, monkeypatch) -> None:
    assert columns(monkeypatch, notes)["judge"].scores == [None, None]


@pytest.mark.parametrize("scores", [[], [None]])
def test_a_mean_over_no_score_is_a_dash(scores, caplog) -> None:
    """With `rollout.token_budget`, no completion may end in a round."""
    none = [None] * len(scores)
    with caplog.at_level("INFO", "rloo"):
        log_summary(Reward(function="own.py:judge"), FunctionScores(scores, none, none, [0.0] * len(scores)))
    assert f"reward judge: mean – over 0 of {len(scores)}" in caplog.text


@pytest.mark.parametrize(("gpus", "starts"), [([0], 1), ([1], 1), ([1, 0], 1), ([1, 1], 2)])
def test_several_tables_are_scored_by_the_same_processes(monkeypatch, gpus, starts) -> None:
    """A reward model starts once for both kinds of completions of an evaluation, if no other shares its GPUs."""
    rewards = [Reward(function=f"own.py:judge{place}", gpus=count) for place, count in enumerate(gpus)]
    pools = MagicMock(rewards=rewards)
    pools.__enter__.return_value = pools
    none = [None, None]
    pools.score.side_effect = lambda batch, *_: [FunctionScores([batch] * 2, none, none, [0.0] * 2)] * len(gpus)
    start = MagicMock(return_value=pools)
    monkeypatch.setattr(score_table, "WorkerPools", start)
    monkeypatch.setattr(score_table, "batch_of", MagicMock(side_effect=[1.0, 2.0]))
    second = ROLLOUTS.set_column(0, "prompt_id", [["b", "b"]])
    tables = score_table.score_tables(rewards, Scoring(), [ROLLOUTS, second], MagicMock(), Policy(Path("policy")))
    assert [table["prompt_id"][0].as_py() for table in tables] == ["a", "b"]
    assert [table["reward"].to_pylist() for table in tables] == [[1.0 * len(gpus)] * 2, [2.0 * len(gpus)] * 2]
    assert start.call_count == starts
    assert [call.args[3] for call in pools.score.call_args_list] == [starts == 1, False], "the last one may end them"


def test_a_table_names_the_files_of_a_reward_model_that_the_run_has_not_trained(tmp_path) -> None:
    """Tables scored before and after it was replaced are not compared."""
    model = tmp_path / "model"
    model.mkdir()
    rewards = [Reward(function=REWARD_MODEL, options={"model": str(model)})]
    row = {"prompt_id": "p", "sample": 0, "scores/reward_model": 1.0, "reward": 1.0, "seconds": 0.0, "error": None}
    schema, scored = tables.scores_schema(["reward_model"]), []
    for name in ("one", "two"):
        (model / "config.json").write_text(json.dumps(name))
        scored.append(tmp_path / f"{name}.parquet")
        tables.write(scored[-1], [row], schema, "scores", **score_table.scoring_facts(rewards))
    with pytest.raises(UserError, match="different versions of your reward functions or models"):
        lineage.require_one_scoring(scored)
    part = pq.read_table(scored[0])
    joined = score_table.scoring_facts(rewards, [part])
    assert joined[lineage.REWARD_FILES] == tables.footer(part)[lineage.REWARD_FILES]  # not the model of today
    (model / MANIFEST).write_text("{}")
    assert lineage.REWARD_FILES not in score_table.scoring_facts(rewards)
