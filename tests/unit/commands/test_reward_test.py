"""What `rloo reward-test` takes as completions."""

from pathlib import Path
from typing import Any

import pytest
from helpers import mini

from rloo_pipeline.before_run import reward_trial
from rloo_pipeline.before_run.findings import DatasetSample
from rloo_pipeline.commands.reward_test import _batch, _own_completions, reward_test
from rloo_pipeline.config import Config, Reward
from rloo_pipeline.errors import UserError

DATA = Path("data.jsonl")


def completions_of(*answers: Any) -> list[Any]:
    rows = [{"prompt": "1+1", "answer": answer} for answer in answers]
    return _batch(rows, _own_completions(DATA, rows), DATA).completions


def test_an_answer_of_any_type_is_a_completion() -> None:
    messages = [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    assert completions_of("2", 2, 0.5, True, messages, [2, 3]) == ["2", "2", "0.5", "True", "It is 2.", "[2, 3]"]


def test_a_function_is_called_with_several_completions_as_in_a_run(tmp_path, capsys) -> None:
    data, function = tmp_path / "data.jsonl", tmp_path / "mine.py"
    data.write_text('{"question": "1+1", "answer": "2"}\n{"question": "1+2", "answer": "3"}\n')
    function.write_text("def mine(completions):\n    return [1.0]\n")
    with pytest.raises(UserError, match=r"returned 1 score for 2 completions"):
        reward_test(Reward(function=f"{function}:mine"), data, None, 1, None)
    function.write_text("def mine(completions):\n    return [1.0 for text, in [completions]]\n")
    with pytest.raises(UserError, match=r"1 of 2 rows failed, row 0 first: .*too many values to unpack"):
        reward_test(Reward(function=f"{function}:mine", batch="group", on_error="none"), data, None, 1, None)
    capsys.readouterr()
    function.write_text("def mine(completions):\n    return [1.0 for _ in completions]\n")
    reward_test(Reward(function=f"{function}:mine"), data, None, 1, None)
    [failed] = [line for line in capsys.readouterr().out.splitlines() if "failed" in line]
    assert "0 rows" in failed


def test_a_function_sees_all_messages_of_an_episode_and_the_text_of_a_single_one() -> None:
    episode = [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "It is 2."}]}]
    rows = [{"question": "1+1", "completion": one} for one in (episode, parts)]
    assert _batch(rows, rows, DATA).completions == [episode, episode[1:]]


@pytest.mark.parametrize(
    "answer", [None, [{"role": "assistant", "content": None}], [{"role": "assistant", "tool_calls": []}]]
)
def test_a_row_without_an_answer_gives_a_one_line_error(answer) -> None:
    with pytest.raises(UserError, match=r"^data\.jsonl: row 1 has null where the completion should be; write one"):
        completions_of("2", answer)


def test_an_episode_that_ends_without_text_gives_a_one_line_error() -> None:
    episode = [{"role": "tool", "content": "2"}, {"role": "assistant", "tool_calls": []}]
    rows = [{"question": "1+1", "completion": episode}]
    with pytest.raises(UserError, match=r"^data\.jsonl: row 0 has null where the completion should be"):
        _batch(rows, rows, DATA)


def test_a_function_gets_the_columns_that_it_gets_in_a_run() -> None:
    row = {"prompt": "1+1", "prompt_ids": [1], "environment_observation": "", "answer": "2", "level": 3}
    tested = _batch([row], [{"completion": "2"}], DATA)
    checked = reward_trial._inputs(Config(**mini()).warmstart, DatasetSample([row], ["1+1"], 1), None).batch
    assert set(tested.columns) == set(checked.columns) == {"answer", "level", "finish_reason"}
