"""A call of a reward function: which return values are scores, and what its errors name."""

import time

import pytest
from helpers import score, score_all

from rloo_pipeline.config import Reward
from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code.reward_call import BadOutputError, checked_scores, collect_notes, score_refused
from rloo_pipeline.user_code.score_batch import RewardBatch


@pytest.mark.parametrize("value", ["'0.5'", "b'0.5'", "bytearray(b'0.5')", "[0.5]"])
def test_a_value_that_only_looks_like_a_number_is_an_error(tmp_path, value) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(completions):\n    return [1.0, {value}]")
    with pytest.raises(UserError, match=r"'mine' .* returned .*0\.5.* for row 1, .* not a number or None"):
        score(Reward(function=f"{file}:mine", batch="all"), RewardBatch(["a"] * 2, ["a"] * 2, None, {}))


def test_an_integer_beyond_all_floats_is_not_finite() -> None:
    with pytest.raises(BadOutputError, match=r"^returned inf for row 3; return None where"):
        checked_scores([1, 10**400], [2, 3])


def test_booleans_and_numpy_scalars_are_numbers(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\ndef mine(completions):\n    return [True, False, np.float32(0.5), np.int64(2)]"
    )
    scores = score(Reward(function=f"{file}:mine", batch="all"), RewardBatch(["a"] * 4, ["a"] * 4, None, {}))
    assert scores == [1.0, 0.0, 0.5, 2.0]


def test_exceptions_in_async_functions_and_imports_name_the_users_line(tmp_path) -> None:
    file = tmp_path / "mine.py"
    (file.parent / "beside.py").write_text("def helper():\n    return {}['key']\n")
    file.write_text("import beside\nasync def mine(completions):\n    return beside.helper()\n")
    batch = RewardBatch(["a"], ["a"], None, {})
    with pytest.raises(UserError, match=r"'mine' .* raised KeyError: 'key' \(beside\.py, line 2\) for row 0"):
        score(Reward(function=f"{file}:mine"), batch)
    file.write_text("import beside\nbeside.helper()\ndef mine(completions):\n    return [1]\n")
    with pytest.raises(UserError, match=r"importing .*mine\.py failed with KeyError: 'key' \(beside\.py, line 2\)"):
        score(Reward(function=f"{file}:mine"), batch)
    file.write_text("def mine(completions)\n    return [1]\n")
    with pytest.raises(UserError, match=r"importing .* failed with SyntaxError: expected ':' \(mine\.py, line 1\)"):
        score(Reward(function=f"{file}:mine"), batch)


GROUPED = """
import asyncio
from rloo_pipeline.errors import UserError

async def one():
    return {}["key"]

async def bad():
    raise UserError("no such key")

async def in_a_group(task):
    async with asyncio.TaskGroup() as group:
        group.create_task(task)

async def mine(completions):
    BODY
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("await in_a_group(one())", r"raised KeyError: 'key' \(mine\.py, line 6\)"),
        ("await in_a_group(bad())", r"cannot continue with row 0: no such key"),
        ("raise asyncio.CancelledError", r"raised CancelledError: \(mine\.py, line 16\)"),
    ],
)
def test_an_async_function_whose_task_fails_or_that_is_cancelled_says_why(tmp_path, body, message) -> None:
    file = tmp_path / "mine.py"
    file.write_text(GROUPED.replace("BODY", body))
    with pytest.raises(UserError, match=rf"'mine' .* {message}"):
        score(Reward(function=f"{file}:mine"), RewardBatch(["a"], ["a"], None, {}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import asyncio; raise asyncio.CancelledError", r"raised CancelledError: \(mine\.py, line 4\)"),
        ("while True: os.open('/dev/null', 0)", r"raised OSError: .* Too many open files: '/dev/null' \(mine\.py"),
    ],
)
def test_a_function_that_is_cancelled_or_has_no_file_descriptor_left_says_why(tmp_path, body, message) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        f"def mine(completions):\n    {body}\n"
    )
    with pytest.raises(UserError, match=rf"'mine' .* {message}"):
        score(Reward(function=f"{file}:mine"), RewardBatch(["a"], ["a"], None, {}))


@pytest.mark.parametrize("place", ["2", "-1", "'a'"])
def test_a_reason_for_a_place_that_the_call_has_not_is_an_error(tmp_path, place) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from rloo_pipeline.rewards.calls import unscored\n"
        f"def mine(completions):\n    unscored({place}, 'no reply')\n    return [None, 1.0]\n"
    )
    with pytest.raises(UserError, match=rf"called unscored with {place} for rows 0 to 1; a place is from 0 to 1, the"):
        score(Reward(function=f"{file}:mine", batch="all"), RewardBatch(["a"] * 2, ["a"] * 2, None, {}))


def test_a_function_that_leaves_its_folder_and_raises_says_what(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import os\ndef mine(completions):\n    os.chdir('/')\n    raise ValueError('boom')\n"
    )
    with pytest.raises(UserError, match=r"'mine' .* raised ValueError: boom for row 0"):
        score(Reward(function="mine.py:mine"), RewardBatch(["a"], ["a"], None, {}))


def test_a_reason_that_utf_8_lacks_can_be_written_all_the_same(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine(completions):\n    raise ValueError('no \\ud83d')\n")
    reward = Reward(function=f"{file}:mine", on_error="none")
    [scored] = score_all([reward], RewardBatch(["a"], ["a"], None, {}), [1], 1)
    assert scored.errors == ["mine raised ValueError: no ? (mine.py, line 2)"]


def test_an_exception_that_cannot_describe_itself_is_named_by_its_type(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Odd(Exception):\n    def __str__(self):\n        return self.args[0].detail\n"
        "def mine(completions):\n    raise Odd('no')\n"
    )
    reward = Reward(function=f"{file}:mine", on_error="none")
    [scored] = score_all([reward], RewardBatch(["a"], ["a"], None, {}), [1], 1)
    assert scored.errors == ["mine raised Odd: (its __str__ raised AttributeError) (mine.py, line 5)"]


def test_a_function_of_one_completion_is_told_the_name_of_the_list(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine(completion):\n    return 1.0\n")
    with pytest.raises(UserError, match=r"needs a column 'completion', .*; did you mean 'completions'\?"):
        score(Reward(function=f"{file}:mine"), RewardBatch(["a"], ["a"], None, {"question": ["a"]}))


def test_a_missing_column_is_compared_only_with_the_datasets_columns(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine(solution):\n    return [1.0]\n")
    for columns, message in (
        ({"question": ["a"]}, r"needs a column 'solution', which the dataset lacks; there are question$"),
        ({"solutions": ["a"]}, r"did you mean 'solutions'\?$"),
    ):
        with pytest.raises(UserError, match=message):
            score(Reward(function=f"{file}:mine"), RewardBatch(["a"], ["a"], None, columns))


@pytest.mark.parametrize("name", ["trainer_state", "log_extra", "log_metric"])
def test_an_argument_of_trls_trainer_is_not_taken_for_a_column(tmp_path, name) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(completions, {name}):\n    return [1.0]\n")
    reward, columns = Reward(function=f"{file}:mine"), {"question": ["a"]}
    with pytest.raises(UserError, match=f"needs '{name}', which only TRL's trainer passes; .*the default None"):
        score(reward, RewardBatch(["a"], ["a"], None, columns))
    assert score(reward, RewardBatch(["a"], ["a"], None, columns | {name: ["a"]})) == [1.0], "a column has this name"


@pytest.mark.parametrize(
    ("scores", "refused", "prompts", "expected"),
    [
        ([0.7, None, 0.2, 0.9], [1], "aaaa", [0.7, 0.0, 0.2, 0.9]),
        ([-3.0, None, -1.0, 2.0], [1], "aaaa", [-3.0, -3.0, -1.0, 2.0]),  # 0 would be more than others get
        ([5.0, None, None, 2.0], [1, 2], "aaba", [5.0, 0.0, None, 2.0]),  # the second prompt may be the cause
        ([None, None, None, None], [1, 2, 3], "aabb", [None, 0.0, None, None]),  # the first one was read
    ],
)
def test_a_refused_completion_gets_no_more_than_its_siblings_and_none_if_all_were_refused(
    scores, refused, prompts, expected
) -> None:
    notes, reasons = collect_notes(), dict.fromkeys(refused, "was too long")
    assert score_refused(scores, reasons, prompts) == expected
    assert notes == reasons


def test_refused_completions_are_found_in_time_that_grows_with_their_number() -> None:
    count = 20_000
    prompts = [[{"role": "user", "content": str(place // 8)}] for place in range(count)]
    reasons = dict.fromkeys(range(0, count, 8), "was too long")
    started = time.process_time()
    assert score_refused([None if place in reasons else 1.0 for place in range(count)], reasons, prompts)[:2] == [0, 1]
    assert time.process_time() - started < 1.0
