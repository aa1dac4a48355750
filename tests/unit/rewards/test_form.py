"""Rewards for form and length."""

import pytest
import torch

from rloo_pipeline.algorithm import shaping
from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.answer import exact_answer_reward
from rloo_pipeline.rewards.format import format_reward, shows_work, think_format_reward
from rloo_pipeline.rewards.length import overlong_reward, target_length_reward


@pytest.mark.parametrize(
    ("text", "form", "work"),
    [
        ("<think>a</think>b", 1, 1),
        ("  <think>a\nb</think>\n\nc\n", 1, 1),
        ("<think></think>b", 1, 0),
        ("<think>a</think>", 0, 0),
        ("<think>a</think> \n", 0, 1),
        ("a<think>b</think>c", 0, 0),
        ("<think>a</think>b<think>c</think>d", 0, 0),
        ("<think><think>a</think>b", 0, 0),
        ("<think>a</think>b</think>c", 0, 0),
        ("</think>a<think>b", 0, 0),
        ("a</think>b", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_format_is_thinking_once_and_then_an_answer(text: str, form: float, work: float) -> None:
    assert think_format_reward([text, [{"role": "assistant", "content": text}]]) == [form, form]
    assert shows_work([text]) == [work]


def test_a_template_may_have_opened_the_thinking() -> None:
    assert think_format_reward(["a</think>b", "<think>a</think>b", "a"], opened=True) == [1, 0, 0]
    assert shows_work(["a</think>b", "</think>b"], opened=True) == [1, 0]


def test_a_pattern_must_match_the_whole_completion() -> None:
    assert format_reward(["so\n#### 12\n", "#### 12 or so", "x\n\n#### -1"], pattern=r".*#### -?\d+\s*") == [1, 0, 1]
    with pytest.raises(UserError, match=r"option pattern '\(' is not a regular expression"):
        format_reward(["a"], pattern="(")


IDS = [[1] * length for length in (0, 1, 10, 99, 100, 150, 199, 200, 201, 1000)]
LENGTHS = torch.tensor([len(ids) for ids in IDS])


@pytest.mark.parametrize(("longest", "cache"), [(200, 100), (200, 7), (200, 200), (1000, 333)])
def test_the_soft_limit_equals_that_of_the_update(longest: int, cache: int) -> None:
    assert overlong_reward(IDS, longest, cache) == shaping.overlong(LENGTHS, longest, cache).tolist()


def test_the_soft_limit_falls_over_its_last_tokens() -> None:
    assert overlong_reward([[1] * 100, [1] * 150, [1] * 175, [1] * 200, [1] * 300], 200, 100) == [
        0,
        -0.5,
        -0.75,
        -1,
        -1,
    ]
    with pytest.raises(UserError, match=r"cache must be above 0 and at most longest \(200\), not 0"):
        overlong_reward(IDS, 200, 0)


@pytest.mark.parametrize("target", [1, 64, 150])
def test_the_target_length_equals_that_of_the_update(target: int) -> None:
    assert target_length_reward(IDS, target) == shaping.off_target(LENGTHS, target).tolist()
    assert target_length_reward(IDS, [target] * len(IDS)) == target_length_reward(IDS, target)


def test_a_target_below_one_token_is_an_error() -> None:
    with pytest.raises(UserError, match="at least 1 token, not 0"):
        target_length_reward([[1], [1]], [5, 0])


def test_an_exact_answer_is_compared_as_a_text_and_a_number_is_refused() -> None:
    texts = ["<think>3</think> 2 ", "2.0", "None"]
    assert exact_answer_reward(texts, ["2", "2", None]) == [1.0, 0.0, None]
    assert exact_answer_reward(["", "<think>2</think>"], ["", " "]) == [None, None], "no answer, not a silent one"
    with pytest.raises(UserError, match=r"compares strings, but the column answer has 2\.0 of type float: make"):
        exact_answer_reward(texts, ["2", 2.0, "2"])
