"""Tasks, tools and rewards of the real library verifiers, in a Python of its own."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from other_pythons import python_of
from rooms import answers, finished

from rloo_pipeline.data.tool_template import answer_messages, call_message
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime.installation import PACKAGE
from rloo_pipeline.user_code.confinement import BOOT_BESIDE, Confinement
from rloo_pipeline.user_code.pool import EnvironmentPool

HERE = Path(__file__).parent
OPTIONS = '{"count": 3}'
TASKS = f"verifiers:word_tasks {OPTIONS}"


@pytest.fixture(scope="module", autouse=True)
def working_folder() -> Iterator[None]:
    """The other Python finds modules of the working folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HERE)
        yield


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Rows as the script of the docs writes them."""
    script = re.search(r"```python\n(# tasks\.py.*?)```", (ROOT / "docs" / "environments.md").read_text(), re.DOTALL)
    assert script
    command = [python_of("verifiers"), "-c", script[1], "word_tasks", OPTIONS]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(TASKS, [], 8, 60.0, Confinement(python=str(python_of("verifiers")))) as made:
        yield made


def test_a_task_is_scored_by_its_own_rewards_on_the_conversation_and_the_state_of_its_tools(pool, rows) -> None:
    [schema] = pool.schemas({})
    assert schema["function"]["name"] == "dictionary_letter"
    assert schema["function"]["parameters"]["required"] == ["place"]
    assert len(rows) == 3
    for episode in (0, 1):
        pool.reset(episode, rows[episode], episode)
    assert [answer.texts for answer in answers(pool, 2)] == [(), ()], "the prompt is the row's"
    pool.call(0, [("dictionary_letter", {"place": 1}), ("dictionary_letter", {"place": "x"})])
    [answer] = answers(pool)
    assert answer.texts[0] == "h"
    assert answer.errors == (False, True)
    assert "Input should be a valid integer" in answer.texts[1]
    calls = call_message([("dictionary_letter", {"place": 1}), ("dictionary_letter", {"place": "x"})])
    told = answer_messages(["dictionary_letter"] * 2, answer.texts)
    pool.finish(0, [calls, *told, {"role": "assistant", "content": "<think>h…</think>\n\nhat"}])
    pool.finish(1, [{"role": "assistant", "content": "hat"}])
    right, wrong = answers(pool, 2)
    assert (right.reward, wrong.reward) == (2 * 1.0 + 0.5, 2 * 0.0 + 1.0)
    assert json.loads(right.state or "") == {"metrics": {"turns": 2.0}, "rewards": {"exact": 1.0, "short": 0.5}}
    assert json.loads(wrong.state or "") == {"metrics": {"turns": 1.0}, "rewards": {"exact": 0.0, "short": 1.0}}


def test_an_episode_that_was_only_reset_is_not_scored(pool, rows) -> None:
    pool.reset(2, rows[2], 0)
    answers(pool)
    assert json.loads(finished(pool, 2)[0].state or "") == {"metrics": {}, "rewards": {}}


REFUSALS = {
    "no_such_tasks": "'verifiers:no_such_tasks' cannot be loaded: taskset 'no_such_tasks' not found",
    'word_tasks {"size": 3}': "cannot be loaded: .*size",
    'word_tasks {"offline": true}': "cannot be loaded: the data set is not on this machine",
    'word_tasks {"alike": true}': "cannot be loaded: two of its tasks have the same key",
    'word_tasks {"count": 0}': "has no tasks",
    'word_tasks {"stops": true}': "needs stops or intercepts, not supported here",
    "openenv": "cannot be loaded: .*base_url",
}
ROWS = {
    "has no task with the key 'another'; write the rows again": {"task": "another"},
    "the prompt of a row differs from that of its task": {"prompt": [{"role": "user", "content": "?"}]},
}
REFUSED = """
import asyncio, json
from rloo_pipeline.environments.verifiers_tasks import environment
from rloo_pipeline.errors import UserError
tasks, rows, *others = sys.argv[1:]
made = environment(tasks)
for call in [lambda row=row: asyncio.run(made().reset(**row)) for row in json.loads(rows)] + [
    lambda other=other: environment(other) for other in others
]:
    try:
        call()
        print()
    except UserError as error:
        print(" ".join(str(error).split()))
"""


@pytest.mark.long
def test_what_cannot_be_played_gives_a_one_line_error(rows) -> None:
    others = json.dumps([rows[0] | change for change in ROWS.values()])
    code = BOOT_BESIDE.partition("from {} import main")[0] + REFUSED
    command = [python_of("verifiers"), "-c", code, str(PACKAGE), TASKS.partition(":")[2], others, *REFUSALS]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for message, line in zip([*ROWS, *REFUSALS.values()], lines, strict=True):
        assert re.search(message, line), line


def test_without_verifiers_a_python_that_has_it_is_asked_for() -> None:
    with EnvironmentPool(TASKS, [], 1, 60.0) as pool, pytest.raises(UserError, match=r"rollout\.environment_python"):
        pool.check()
