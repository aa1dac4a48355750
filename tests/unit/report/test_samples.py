"""The completions of the report's page: an episode is shown message by message, with its calls."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from helpers import write_prompts
from synthetic_runs import configuration, make_run

from rloo_pipeline.artifacts import tables
from rloo_pipeline.data.tool_template import answer_messages, call_message
from rloo_pipeline.report.run_tables import read_round
from rloo_pipeline.report.samples import (
    MAX_CHARACTERS,
    _completions,
    _messages,
    _rarer_first,
    choose_groups,
    groups,
    turns_of,
)


def test_an_episode_is_shown_turn_by_turn() -> None:
    calls = [("add", {"a": 1, "b": "ü"}), ("stop", {})]
    messages = [
        call_message(calls, "I add."),
        *answer_messages(["add", "stop"], ["3", ""]),
        {"role": "assistant", "content": "3"},
    ]
    turns = turns_of({"completion": "", "messages": json.dumps(messages)})
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("assistant", 'I add.\n→ add(a=1, b="ü")\n→ stop()'),
        ("tool add", "3"),
        ("tool stop", ""),
        ("assistant", "3"),
    ]


@pytest.mark.parametrize("content", ["", None])
def test_a_prompt_shows_the_calls_of_its_history(content: str | None) -> None:
    calls = [{"function": {"name": "add", "arguments": {"a": 1}}}, {"name": "stop", "arguments": '{"b": 2}'}]
    [shown] = _messages({"prompt": [{"role": "assistant", "content": content, "tool_calls": calls}]})
    assert shown["content"] == '→ add(a=1)\n→ stop({"b": 2})'


def test_a_completion_without_tools_is_one_turn_and_messages_share_the_characters() -> None:
    assert turns_of({"completion": "x"}) == [{"role": "assistant", "content": "x"}]
    long = "x" * (2 * MAX_CHARACTERS)
    for row in ({"completion": long}, {"messages": json.dumps([{"role": "assistant", "content": long}] * 3)}):
        shown = "".join(turn["content"] for turn in turns_of(row))
        assert shown.count("x") == MAX_CHARACTERS


def test_a_prompt_is_shortened_as_a_completion_is() -> None:
    long = "x" * (2 * MAX_CHARACTERS)
    for prompt in (long, [{"role": "system", "content": long}, {"role": "user", "content": long}]):
        shown = "".join(message["content"] for message in _messages({"prompt": prompt}))
        assert shown.count("x") == MAX_CHARACTERS
    short = [{"role": "user", "content": "1+1"}]
    assert _messages({"prompt": short, "decoded": "a column of the dataset"}) == short


def test_more_messages_than_characters_are_all_shortened() -> None:
    messages = [{"role": "assistant", "content": "xx"}] * (MAX_CHARACTERS // 2 + 1)
    assert not any("x" in turn["content"] for turn in turns_of({"messages": json.dumps(messages)}))


def test_the_tokens_of_an_episode_are_those_that_the_model_sampled() -> None:
    row = {"completion_ids": [5, 6, 7], "sampling_logps": [-1.0], "messages": '[{"role": "assistant", "content": "1"}]'}
    scores = dict.fromkeys(("scores/answer", "scores/worked", "reward"), 1.0)
    [shown] = _completions(configuration(), pa.Table.from_pylist([row | scores | {"finish_reason": "stop"}]))
    assert shown.tokens == 1


def test_a_completion_that_is_left_out_of_the_loss_is_shown_without_an_advantage(tmp_path) -> None:
    """With `keep_truncated_in_baseline` its row has one, which changes nothing."""
    config = configuration(rounds=1).only("report")
    run = make_run(tmp_path / "run", config)
    file = run / "rounds" / "00001" / "train.parquet"
    rows = [row | {"masked": row["sample"] == 0} for row in tables.read(file, "train").to_pylist()]
    tables.write(file, rows, tables.TRAIN, "train", round=1)
    for group in groups(config, run, 1):
        assert [completion.advantage is None for completion in group.completions] == [True, False, False, False]


def test_half_of_the_groups_come_by_chance_and_the_others_show_rare_right_answers_and_the_lowest_advantage() -> None:
    right, advantages = np.zeros((40, 4), dtype=bool), np.zeros((40, 4))
    right[20:30], right[31, 0] = True, True
    advantages[37, 2], advantages[5] = -3, np.nan
    drawn = [8, 3, 11, *(index for index in range(40) if index not in {8, 3, 11})]
    assert choose_groups(right, advantages, drawn, 6) == [3, 8, 11, 20, 31, 37]
    assert choose_groups(np.zeros((4, 2), dtype=bool), np.zeros((4, 2)), [2, 0, 3, 1], 6) == [0, 1, 2, 3]


def test_the_rarer_kind_of_a_large_group_is_shown() -> None:
    group = np.zeros(30, dtype=bool)
    group[[12, 29]] = True
    assert _rarer_first(group, 4) == [0, 1, 12, 29]
    assert _rarer_first(~group, 4) == [0, 1, 12, 29]
    nearly_half = np.arange(30) >= 16
    assert _rarer_first(nearly_half, 4) == _rarer_first(~nearly_half, 4) == [16, 17, 18, 19]


def write_round(run: Path, number: int, prompts: list[str]) -> None:
    """Writes a trained round with groups of two completions; the advantage of a row is its place."""
    folder, about = run / "rounds" / f"{number:05d}", {"run": "synthetic", "round": number, "seed": 3, "policy": "p"}
    keys = [{"prompt_id": name, "sample": sample} for name in prompts for sample in range(2)]
    tokens = {"prompt_ids": [1], "completion_ids": [2], "completion": "", "sampling_logps": [0.0], "seed": 0}
    segments = [{"end": 1, "policy_round": number - 1}]
    rollouts = [{**key, **tokens, "finish_reason": "stop", "segments": segments, "carried": False} for key in keys]
    tables.write(folder / "rollouts" / "000.parquet", rollouts, tables.IN_SEGMENTS, "rollouts", shard=0, **about)
    facts = tables.facts_about(tables.read(folder / "rollouts" / "000.parquet", "rollouts"))
    scored = {"scores/answer": 1.0, "scores/worked": 1.0, "reward": 1.0, "seconds": 0.0, "error": None}
    schema = tables.scores_schema(["answer", "worked"])
    tables.write(folder / "scores" / "000.parquet", [{**key, **scored} for key in keys], schema, "scores", **facts)
    values = {"reward": 1.0, "kl": 0.0, "ratio": 1.0, "clipped": False, "masked": False}
    trained = [{**key, **values, "advantage": place} for place, key in enumerate(keys)]
    tables.write(folder / "train.parquet", trained, tables.TRAIN, "train", **about)


@pytest.mark.parametrize("prompts", [["a", "b", "a"], []])
def test_groups_of_a_prompt_that_end_in_one_round_stay_apart_and_a_round_may_have_none(tmp_path, prompts) -> None:
    """Both happen with `rollout.token_budget`."""
    config = configuration(rollout={"num_generations": 2, "generation_batch_size": 4, "token_budget": 8})
    write_prompts(tmp_path / "prompts", [{"prompt_id": name, "prompt": name} for name in "ab"])
    write_round(tmp_path, 1, prompts)
    advantages = list(range(2 * len(prompts)))
    assert read_round(tmp_path / "rounds" / "00001", config.rollout)["advantage"].to_pylist() == advantages
    shown = groups(config, tmp_path, 1)
    assert [group.messages[0]["content"] for group in shown] == prompts
    assert [completion.advantage for group in shown for completion in group.completions] == advantages
