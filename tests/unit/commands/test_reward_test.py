"""What `rloo reward-test` takes as completions."""

from pathlib import Path
from typing import Any

import pytest

from rloo_pipeline.commands.reward_test import _batch, _own_completions
from rloo_pipeline.errors import UserError

DATA = Path("data.jsonl")


def completions_of(*answers: Any) -> list[Any]:
    rows = [{"prompt": "1+1", "answer": answer} for answer in answers]
    return _batch(rows, _own_completions(DATA, rows), DATA).completions


def test_an_answer_of_any_type_is_a_completion() -> None:
    messages = [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    assert completions_of("2", 2, 0.5, True, messages, [2, 3]) == ["2", "2", "0.5", "True", "It is 2.", "[2, 3]"]


def test_a_row_without_an_answer_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"^data\.jsonl: row 1 has null where the completion should be; give it a text"):
        completions_of("2", None)
