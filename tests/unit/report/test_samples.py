"""The completions of the report's page: an episode is shown message by message, with its calls."""

import json

import numpy as np

from rloo_pipeline.data.tool_template import answer_messages, call_message
from rloo_pipeline.report.samples import MAX_CHARACTERS, ShownTurn, _messages, _rarer_first, choose_groups, turns_of


def test_an_episode_is_shown_turn_by_turn() -> None:
    calls = [("add", {"a": 1, "b": "ü"}), ("stop", {})]
    messages = [
        call_message(calls, "I add."),
        *answer_messages(["add", "stop"], ["3", ""]),
        {"role": "assistant", "content": "3"},
    ]
    assert turns_of({"completion": "", "messages": json.dumps(messages)}) == [
        ShownTurn("assistant", 'I add.\n→ add(a=1, b="ü")\n→ stop()'),
        ShownTurn("tool add", "3"),
        ShownTurn("tool stop", ""),
        ShownTurn("assistant", "3"),
    ]


def test_a_completion_without_tools_is_one_turn_and_messages_share_the_characters() -> None:
    assert turns_of({"completion": "x"}) == [ShownTurn("assistant", "x")]
    long = "x" * (2 * MAX_CHARACTERS)
    for row in ({"completion": long}, {"messages": json.dumps([{"role": "assistant", "content": long}] * 3)}):
        shown = "".join(turn.text for turn in turns_of(row))
        assert shown.count("x") == MAX_CHARACTERS


def test_a_prompt_is_shortened_as_a_completion_is() -> None:
    long = "x" * (2 * MAX_CHARACTERS)
    for prompt in (long, [{"role": "system", "content": long}, {"role": "user", "content": long}]):
        shown = "".join(message["content"] for message in _messages({"prompt": prompt}))
        assert shown.count("x") == MAX_CHARACTERS
    short = [{"role": "user", "content": "1+1"}]
    assert _messages({"prompt": short, "decoded": "a column of the dataset"}) == short


def test_of_more_messages_than_characters_none_is_shown_in_whole() -> None:
    messages = [{"role": "assistant", "content": "xx"}] * (MAX_CHARACTERS // 2 + 1)
    assert not any("x" in turn.text for turn in turns_of({"messages": json.dumps(messages)}))


def test_half_of_the_groups_come_by_chance_and_the_others_show_rare_right_answers_and_the_lowest_advantage() -> None:
    right, advantages = np.zeros((40, 4), dtype=bool), np.zeros((40, 4))
    right[20:30], right[31, 0] = True, True
    advantages[37, 2], advantages[5] = -3, np.nan
    drawn = [8, 3, 11, *(index for index in range(40) if index not in {8, 3, 11})]
    assert choose_groups(right, advantages, drawn, 6) == [3, 8, 11, 20, 31, 37]
    assert choose_groups(np.zeros((4, 2), dtype=bool), np.zeros((4, 2)), [2, 0, 3, 1], 6) == [0, 1, 2, 3]


def test_of_a_large_group_the_rarer_kind_is_shown() -> None:
    group = np.zeros(30, dtype=bool)
    group[[12, 29]] = True
    assert _rarer_first(group, 4) == [0, 1, 12, 29]
    assert _rarer_first(~group, 4) == [0, 1, 12, 29]
