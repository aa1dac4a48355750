"""A judge sees each pair of completions in both orders."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from helpers import mini

from rloo_pipeline.artifacts import tables
from rloo_pipeline.config import REWARD_MODEL, Config
from rloo_pipeline.config.loading import validate
from rloo_pipeline.errors import UserError
from rloo_pipeline.stages import judge_pairs as stage

KEYS = [("p", 0), ("p", 1), ("q", 0), ("q", 1)]
JUDGE = """
def alone(completions, **columns):
    return [1.0] * len(completions)

def prefer(prompts, completions, other_completions, **_):
    return [None if one == "?" or other == "?" else float(len(one) >= len(other))
            for one, other in zip(completions, other_completions)]

def eager(prompts, completions, other_completions):
    return [2.0] * len(completions)

def refused(prompts, completions, other_completions):
    from rloo_pipeline.user_code.reward_call import unscored
    for row in range(len(completions)):
        unscored(row, "was refused with status 400")
    return [None] * len(completions)
"""


class Prompts:
    """Two held-out prompts."""

    columns = ("prompt", "prompt_id")

    def __init__(self, _: Path) -> None: ...

    def by_id(self, ids: list[str]) -> dict[str, dict[str, str]]:
        return {name: {"prompt_id": name, "prompt": f"about {name}"} for name in ids}


def completions(path: Path, evaluated: str, texts: list[str]) -> Path:
    rows = [
        {"prompt_id": prompt, "sample": sample, "prompt_ids": [1], "completion_ids": [2], "completion": text}
        | {"sampling_logps": [0.0], "finish_reason": "stop", "seed": 0}
        for (prompt, sample), text in zip(KEYS, texts, strict=True)
    ]
    tables.write(path, rows, tables.ROLLOUTS, "completions", evaluated=evaluated)
    return path


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Judges four pairs with a function of JUDGE; returns the table."""
    monkeypatch.setattr(stage, "PromptSet", Prompts)
    (tmp_path / "judges.py").write_text(JUDGE)
    before = completions(tmp_path / "before.parquet", "warmstart", ["ab", "abc", "a", "?"])
    after = completions(tmp_path / "after.parquet", "final", ["abc", "ab", "a", "abc"])

    def run(function: str) -> pa.Table:
        config = Config(**mini(judge={"function": f"{tmp_path / 'judges.py'}:{function}"}))
        stage.judge_pairs(config, tmp_path, before, after, tmp_path / "judgements.parquet")
        return tables.read(tmp_path / "judgements.parquet", "judgements")

    return run


def test_each_pair_is_judged_in_both_orders(judged) -> None:
    table = judged("prefer")
    nan = float("nan")
    np.testing.assert_equal(table["final_first"].to_numpy(), [1, 0, 1, nan])
    np.testing.assert_equal(table["warmstart_first"].to_numpy(), [1, 0, 0, nan])
    assert {"warmstart", "final", "functions"} <= tables.footer(table).keys()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weight": 2.0}, "judge: weight has no effect on a judge"),
        ({"gpus": 1}, "judge: gpus: a judge runs without GPUs"),
        ({"on_timeout": 5.0}, "judge: on_timeout: 5 is not a verdict"),
        ({"function": REWARD_MODEL}, "judge: function: a reward model compares no completions"),
    ],
)
def test_what_a_judge_cannot_be_is_refused_before_the_run(keys, message) -> None:
    with pytest.raises(UserError, match=f"^test: {message}"):
        validate(mini(judge={"function": "a.py:b"} | keys), "test")


def test_a_verdict_outside_of_0_to_1_is_refused(judged) -> None:
    with pytest.raises(
        UserError, match=r"judge eager: returned 2 for row 0; return from 0 .* to 1 \(better\), or None"
    ):
        judged("eager")


def test_a_judge_that_can_judge_no_pair_is_an_error(judged) -> None:
    with pytest.raises(
        UserError, match=r"'refused' .* could score none of 4 completions: refused was refused with status 400"
    ):
        judged("refused")


def test_a_reward_function_that_compares_nothing_is_not_a_judge(judged) -> None:
    with pytest.raises(UserError, match=r"has no parameter 'other_completions', so it compares nothing"):
        judged("alone")
