"""Episodes are the same whatever tools take and in how many processes they run, and consist of the ids as they came."""

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import OBSERVATION
from rloo_pipeline.config import Dataset, Rollout
from rloo_pipeline.data.tool_template import ToolTemplate, call_message
from rloo_pipeline.demo.character_model import TOOL_CHAT_TEMPLATE, tool_qwen3
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import resets, tool_calls
from rloo_pipeline.rollout.episode_loop import Episodes
from rloo_pipeline.rollout.requests import Completion, Request, SamplingConfig
from rloo_pipeline.rollout.tool_calls import MALFORMED, TOO_MANY, CallReader
from rloo_pipeline.user_code.pool import EnvironmentPool

SAMPLING = SamplingConfig(1.0, 1.0, 0, None, 120)
TOOLS = """
import time

def calculator(expression: str) -> str:
    '''Computes.

    Args:
        expression: a sum
    '''
    time.sleep({seconds} * (len(expression) % 3))
    return str(eval(expression))
"""


def written(file: Path, text: str) -> str:
    """Writes a file with a calculator; returns what the configuration calls it by."""
    file.write_text(text)
    return f"{file}:calculator"


@pytest.fixture(scope="module")
def calculator(tmp_path_factory) -> str:
    """A tool that answers at once."""
    return written(tmp_path_factory.mktemp("tools") / "tools.py", TOOLS.format(seconds=0))


POOLS: dict[str, EnvironmentPool] = {}
"""Pools of processes for tools and environments, which take seconds to start, by their configuration."""


@pytest.fixture(scope="module", autouse=True)
def pools() -> Iterator[None]:
    yield
    with ExitStack() as stack:
        for pool in POOLS.values():
            stack.push(pool)
    POOLS.clear()


def pool_of(rollout: Rollout) -> EnvironmentPool:
    """One pool for all episodes with the same tools and environment."""
    key = str((rollout.tools, rollout.environment, rollout.environment_workers))
    if key not in POOLS:
        POOLS[key] = resets.pool_of(rollout).__enter__()
    return POOLS[key]


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> ToolTemplate:
    folder = tmp_path_factory.mktemp("model")
    tool_qwen3(folder, 0, hidden_size=32, layers=1, heads=1, key_value_heads=1, head_dim=32, intermediate_size=64)
    return ToolTemplate(Policy(folder), Dataset.model_construct(chat_template_kwargs={}))


@pytest.fixture(scope="module")
def reader(template) -> CallReader:
    return CallReader(template, "auto")


def turn(template, text, ended=True) -> Completion:
    ids = list(template.tokenizer(text)["input_ids"]) + [template.tokenizer.eos_token_id] * ended
    return Completion(ids, text, [-0.5] * len(ids), "stop" if ended else "length")


def write(template, request) -> Completion:
    """A model whose turn depends on the ids before it and on the seed alone: it calls, or writes what it was told."""
    rng = random.Random(f"{request.seed} {request.prompt_ids}")
    if rng.random() < 0.6:
        expression = "+".join(str(rng.randint(1, 99)) for _ in range(rng.randint(2, 4)))
        return turn(template, template.turn_text(call_message([("calculator", {"expression": expression})])))
    return turn(template, str(rng.randint(0, 99)))


def rows_of(count, observation="") -> list[dict]:
    """Rows of a prompt set whose prompts end with the observation."""
    prompt = [{"role": "user", "content": f"1{observation}"}]
    return [{"prompt_id": f"{place}", "prompt": prompt, OBSERVATION: observation} for place in range(count)]


def sample_episodes(template, reader, model, count=12, observation="", **settings) -> list[dict]:
    """The columns of episodes with a model, of which one turn at a time is sampled, the last that came first."""
    rollout = Rollout(**{"environment_workers": 1} | settings)
    rows = rows_of(count, observation)
    requests = [Request([5, 6, 7], seed, SAMPLING) for seed in range(count)]
    episodes = Episodes(rollout, pool_of(rollout), reader, rows, requests)
    running: list = []
    while True:
        running += episodes.requests(not running)
        if not running:
            break
        place, request = running.pop()
        assert request.sampling.max_completion_length >= 1
        episodes.take(place, model(template, request))
    return [episode.columns() for episode in episodes.episodes]


def test_neither_slow_tools_nor_workers_change_an_episode(template, reader, tmp_path) -> None:
    results = []
    for number, (seconds, workers) in enumerate([(0, 4), (0.02, 4), (0, 1)]):
        tools = [written(tmp_path / f"tools_{number}.py", TOOLS.format(seconds=seconds))]
        results.append(sample_episodes(template, reader, write, tools=tools, environment_workers=workers))
    assert results[0] == results[1] == results[2]
    assert max(len(row["turns"]) for row in results[0]) >= 5, "with several calls"


def test_ids_mask_turns_and_messages_say_the_same(template, reader, calculator) -> None:
    decode = template.tokenizer.decode
    for row in sample_episodes(template, reader, write, tools=[calculator]):
        messages = json.loads(row["messages"])
        assert [turn["role"] for turn in row["turns"]] == [message["role"] for message in messages]
        assert messages[-1]["role"] == "assistant"
        assert len(row["sampling_logps"]) == sum(row["loss_mask"])
        for turn_, message in zip(row["turns"], messages, strict=True):
            part = slice(turn_["start"], turn_["end"])
            assert set(row["loss_mask"][part]) == {turn_["role"] == "assistant"}
            assert message["content"] in decode(row["completion_ids"][part])
        whole = template.render([{"role": "user", "content": "1"}, *messages])
        before = template.render([{"role": "user", "content": "1"}], True)
        assert decode(row["completion_ids"]) == whole[len(before) :], "as the template writes the conversation"


@pytest.mark.parametrize(
    ("key", "turns"), [({"max_turns": 2}, 2), ({"max_tool_calling_iterations": 2}, 3), ({}, 3)], ids=str
)
def test_an_episode_ends_with_the_model_at_a_limit(template, reader, calculator, key, turns) -> None:
    call = template.turn_text(call_message([("calculator", {"expression": "1+1" + "+10" * (0 if key else 7)})]))
    [row] = sample_episodes(template, reader, lambda template, _: turn(template, call), 1, tools=[calculator], **key)
    roles = [turn["role"] for turn in row["turns"]]
    assert roles.count("assistant") == turns
    assert roles[-1] == "assistant"
    assert row["finish_reason"] == ("stop" if key else "length"), "no room for another answer"
    assert len(row["completion_ids"]) <= SAMPLING.max_completion_length


def test_a_call_that_cannot_be_read_gets_the_error_as_answer(template, reader, calculator) -> None:

    def model(template, request):
        return turn(template, "<tool_call>{1+</tool_call>" if len(request.prompt_ids) == 3 else "2")

    [row] = sample_episodes(template, reader, model, 1, tools=[calculator])
    assert [message["content"] for message in json.loads(row["messages"])][1:] == [MALFORMED, "2"]


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "1e999"])
def test_a_call_that_cannot_be_stored_cannot_be_read(reader, value) -> None:
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": {value}}}}}</tool_call>'
    assert reader.read(call, []) == (call, (), True)


def test_several_calls_at_once_may_be_too_many(template, reader, calculator, monkeypatch) -> None:
    call = template.turn_text(call_message([("calculator", {"expression": "1+1"})]))

    def model(template, request):
        return turn(template, call * 2 if len(request.prompt_ids) == 3 else "2")

    for several, answers in ((True, ["2", "2", "2"]), (False, [TOO_MANY, "2"])):
        monkeypatch.setitem(template.__dict__, "several_calls", several)
        [row] = sample_episodes(template, reader, model, 1, tools=[calculator])
        assert [message["content"] for message in json.loads(row["messages"])][1:] == answers
        assert (row["tool_calls"], row["tool_failures"]) == (2, 0 if several else 2)


def test_calls_and_those_that_fail_are_counted_as_in_trl(template, reader, calculator) -> None:
    """Not a call that cannot be read, nor one that a limit prevents; an answer without room was a call."""
    right, wrong = (template.turn_text(call_message([("calculator", {"expression": text})])) for text in ("1+1", "1+"))

    def counts(*texts: str, **limits) -> tuple[int, int]:
        remaining = list(texts)
        [row] = sample_episodes(
            template,
            reader,
            lambda template, _: turn(template, remaining.pop(0)),
            1,
            tools=[calculator],
            **limits,
        )
        return row["tool_calls"], row["tool_failures"]

    assert counts("2") == (0, 0)
    assert counts("<tool_call>{1+</tool_call>", "2") == (0, 0)
    assert counts(right, wrong, "2") == (2, 1)
    assert counts(right, right, max_turns=2) == (1, 0)
    [row] = sample_episodes(template, reader, lambda template, _: turn(template, right), 1, tools=[calculator])
    answers = sum(turn["role"] == "tool" for turn in row["turns"])
    assert row["tool_calls"] == answers + 1, "the last answer had no room"


def test_each_turn_has_a_seed_of_its_own(template, reader, calculator) -> None:
    seeds = []

    def model(template, request):
        seeds.append(request.seed)
        return write(template, request)

    sample_episodes(template, reader, model, tools=[calculator])
    assert set(range(12)) < set(seeds)
    assert len(seeds) == len(set(seeds)) > 20


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}", ""), "leaves out the list of tools"),
        (("call['function'] | tojson", "''"), "leaves out the call of a tool"),
        (("message['content'] + '</tool_response>'", "'</tool_response>'"), "leaves out the answer of a tool"),
        (
            ("{% else %}{{ message['content'] }}", "{% else %}{{ message['content'] if loop.last else '' }}"),
            "writes earlier turns differently",
        ),
    ],
)
def test_a_template_that_cannot_be_used_with_tools_is_refused(template, change, reason) -> None:
    function = {"name": "calculator", "description": "", "parameters": {"type": "object", "properties": {}}}
    schemas = [{"type": "function", "function": function}]
    template.check(schemas)
    template.tokenizer.chat_template = TOOL_CHAT_TEMPLATE.replace(*change)
    assert template.tokenizer.chat_template != TOOL_CHAT_TEMPLATE
    try:
        with pytest.raises(UserError, match=reason):
            template.check(schemas)
    finally:
        template.tokenizer.chat_template = TOOL_CHAT_TEMPLATE


def test_a_parser_that_does_not_read_the_templates_calls_is_refused(template, monkeypatch) -> None:
    with pytest.raises(UserError, match="vLLM has no parser 'hermess'"):
        CallReader(template, "hermess")
    with pytest.raises(UserError, match=r"tool_parser: mistral: this parser does not read calls .*; set one of auto, "):
        CallReader(template, "mistral")
    monkeypatch.setattr(tool_calls, "AUTO", ("mistral",))
    with pytest.raises(UserError, match="tool_parser: auto: none of mistral reads calls as the chat template "):
        CallReader(template, "auto")


COUNTER = """
import random

class Counter:
    def reset(self, prompt, **row):
        self.total, self.draw = {start}, random.random()
        return f" from {{self.total}}"

    def calculator(self, expression: str) -> str:
        '''Adds a number.

        Args:
            expression: which
        '''
        self.total += int(expression)
        return str(self.total)

    def get_reward(self):
        return self.total + self.draw
"""


def count(template, request) -> Completion:
    """A model that adds numbers, once in a way that cannot be read, until it ends or has no room for an answer."""
    rng = random.Random(str(request))
    if rng.random() < 0.8:
        text = template.turn_text(call_message([("calculator", {"expression": str(rng.randint(1, 99))})]))
        return turn(template, text if rng.random() < 0.9 else text.replace('"}}', ""))
    return turn(template, "1")


def test_episodes_of_an_environment_are_the_same_in_any_number_of_processes(template, reader, tmp_path) -> None:
    for name, start in (("same", 3), ("other", 4)):
        (tmp_path / f"{name}.py").write_text(COUNTER.format(start=start))
    file = f"{tmp_path}/same.py:Counter"
    episodes = sample_episodes(template, reader, count, 40, observation=" from 3", environment=file, max_turns=6)
    kinds = {(one["finish_reason"], "tool_calls" in json.loads(one["messages"])[-1]) for one in episodes}
    assert kinds >= {("stop", False), ("stop", True), ("length", True)}, "the model ended, or a limit did"
    assert any(MALFORMED in one["messages"] for one in episodes)
    assert len({one["environment_reward"] for one in episodes}) == 40
    again = {"observation": " from 3", "max_turns": 6, "environment_workers": 3}
    assert sample_episodes(template, reader, count, 40, environment=file, **again) == episodes
    with pytest.raises(UserError, match="reset returned ' from 4' for prompt 0"):
        sample_episodes(template, reader, count, 1, observation=" from 3", environment=f"{tmp_path}/other.py:Counter")
