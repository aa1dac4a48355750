"""A demonstration that calls a tool is one demonstration for each turn, in the tokens that an episode has."""

import io
import json
from unittest.mock import Mock

import pytest
from helpers import mini, write_prompts
from rich.console import Console

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import OBSERVATION
from rloo_pipeline.config import Config, Dataset, Sft
from rloo_pipeline.data.prompting import completion_messages, encode
from rloo_pipeline.data.tool_template import ToolTemplate
from rloo_pipeline.demo.calculation import demonstrations
from rloo_pipeline.demo.character_model import tool_qwen3
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import templating
from rloo_pipeline.runtime import progress
from rloo_pipeline.training import sft
from rloo_pipeline.training.demonstrations import Demonstrations, _check_turns, _turns, evaluated_prompts
from rloo_pipeline.training.demonstrations import demonstrations as tokenized

ANSWER = {"role": "assistant", "content": "6"}
BARE = {**ANSWER, "tool_calls": [{"name": "calculator", "arguments": {}}]}
CALL = {**ANSWER, "tool_calls": [{"type": "function", "function": {"name": "calculator", "arguments": {}}}]}
TOLD = {"role": "tool", "name": "calculator", "content": "6"}


def test_the_turns_of_a_demonstration_make_up_the_templates_rendering(tmp_path) -> None:
    tool_qwen3(tmp_path, 0, hidden_size=32, layers=1, heads=1, key_value_heads=1, head_dim=32, intermediate_size=64)
    template = ToolTemplate(Policy(tmp_path), Dataset.model_construct(chat_template_kwargs={}))
    tokenizer = template.tokenizer
    [row] = demonstrations("train", 1, called_share=1.0)
    prompt = template.render(row["prompt"], True)
    (first, call), (second, answer) = _turns(tokenizer(prompt)["input_ids"], row["completion"], template)
    decode = tokenizer.decode
    assert decode(first) == prompt
    assert second[: len(first) + len(call)] == first + call
    assert decode(second + answer) == template.render([*row["prompt"], *row["completion"]])
    assert "<tool_call>" in decode(call)
    assert "<tool_response>" not in decode(call) + decode(answer), "answers are in the context alone"


def test_a_prompt_that_lacks_the_observation_of_a_reset_is_refused(tmp_path) -> None:
    tool_qwen3(tmp_path, 0, hidden_size=32, layers=1, heads=1, key_value_heads=1, head_dim=32, intermediate_size=64)
    config = Config(**mini())
    tokenizer = Policy(tmp_path).tokenizer

    def asked(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    for part, text in (("train", "1+5=6?"), ("eval", "2+5=7?")):
        ids = encode(asked(text), config.dataset, tokenizer, part)
        row = {"prompt_id": part, "prompt": asked(text), "prompt_ids": ids, OBSERVATION: text[-2:]}
        write_prompts(tmp_path / "prompts", [row], part)
    file = tmp_path / "demonstrations.jsonl"

    def read(*texts: str) -> Demonstrations:
        rows = ({"prompt": asked(text), "completion": "6"} for text in texts)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        section = Sft(demonstrations={"path": str(file)}, held_out=0)
        return tokenized(config, section, str(file), Policy(tmp_path), tmp_path / "prompts")

    read_ones = read("1+5=6?", "2+5=7?")
    assert (len(read_ones.trained.prompts), len(read_ones.held_out)) == (1, 1)
    with pytest.raises(
        UserError,
        match=r"row 1: its prompt is not one of this run's, which end with the text that the environment's `reset`",
    ):
        read("1+5=6?", "2+5=")


def test_a_completion_that_spells_the_end_of_its_turn_is_refused(tmp_path) -> None:
    tool_qwen3(tmp_path, 0, hidden_size=32, layers=1, heads=1, key_value_heads=1, head_dim=32, intermediate_size=64)
    template = ToolTemplate(Policy(tmp_path), Config(**mini()).dataset)
    _check_turns(list(_turns([5], [ANSWER], template)), template, "row 3")
    spelled = [{"role": "assistant", "content": "6<|im_end|>"}]
    with pytest.raises(UserError, match=r"^row 3: a completion .* spells '<\|im_end\|>', which ends a turn; remove it"):
        _check_turns(list(_turns([5], spelled, template)), template, "row 3")


@pytest.mark.parametrize("messages", ["6", [ANSWER], [CALL, TOLD, ANSWER], [CALL, TOLD, CALL, TOLD, ANSWER]], ids=len)
def test_a_text_and_an_episode_are_completions(messages) -> None:
    assert completion_messages({"completion": messages}, "completion", "x.jsonl")[-1] == ANSWER


def test_a_message_with_calls_may_lack_a_text() -> None:
    silent = {key: value for key, value in CALL.items() if key != "content"}
    for call in (silent, silent | {"content": None}):
        read = completion_messages({"completion": [call, TOLD, ANSWER]}, "completion", "x.jsonl")
        assert read == [CALL | {"content": ""}, TOLD, ANSWER]


@pytest.mark.parametrize(
    "messages",
    [
        6,
        [],
        ["6"],
        [TOLD],
        [CALL],
        [CALL, ANSWER],
        [CALL, TOLD],
        [ANSWER, ANSWER],
        [CALL, TOLD, TOLD],
        [BARE, TOLD, ANSWER],
        [{**ANSWER, "tool_calls": True}, TOLD, ANSWER],
        [{**ANSWER, "tool_calls": 1}],
    ],
)
def test_calls_without_answers_are_refused(messages) -> None:
    with pytest.raises(UserError, match="column 'completion'"):
        completion_messages({"completion": messages}, "completion", "x.jsonl")


def test_the_order_of_an_epoch_is_drawn_once_and_not_for_each_of_its_steps(monkeypatch) -> None:
    drawn = Mock(side_effect=sft.permutation)
    monkeypatch.setattr(sft, "permutation", drawn)
    rows = list[int]()
    losses = sft.take_steps("steps", 1003, 41, 50, 7, lambda of_step: rows.extend(of_step) or float(len(rows)))
    assert losses == [41.0 * step for step in range(1, 51)]
    assert drawn.call_count == 3
    assert [sorted(rows[first : first + 1003]) for first in (0, 1003)] == 2 * [[*range(1003)]]


def test_the_bar_of_the_steps_has_left_the_terminal_when_the_error_of_one_is_shown(monkeypatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=terminal, force_terminal=True, _environ={}))
    monkeypatch.delenv(progress.STYLE, raising=False)
    with pytest.raises(UserError) as shown:
        sft.take_steps("steps", 4, 2, 2, 7, Mock(side_effect=UserError("not finite")))
    assert "\x1b[?25h" in terminal.getvalue(), f"the cursor is still hidden at {shown.value}"


def test_a_demonstration_of_an_evaluation_prompt_with_other_white_space_is_held_out(tmp_path, tiny_model) -> None:
    config, tokenizer = Config(**mini()), Policy(tiny_model).tokenizer

    def row(text: str) -> dict:
        prompt = [{"role": "user", "content": text}]
        return {"prompt_id": text, "prompt": prompt, "prompt_ids": encode(prompt, config.dataset, tokenizer, text)}

    for part, text in (("train", "1+5="), ("eval", "2+5=")):
        write_prompts(tmp_path / "prompts", [row(text)], part)
    rows = [{"prompt": row(text)["prompt"], "completion": "6"} for text in ("1+5=", "2+5=\n")]
    (tmp_path / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = Sft(demonstrations={"path": "x"}, held_out=0)
    read = tokenized(config, section, str(tmp_path / "demonstrations.jsonl"), Policy(tiny_model), tmp_path / "prompts")
    assert (len(read.trained.prompts), len(read.held_out)) == (1, 1)


def test_the_same_words_with_the_tools_of_another_environment_are_another_prompt() -> None:
    game, room = ({"prompt": "Begin.", "prompt_ids": [ids], "environment": name} for ids, name in enumerate("ab"))
    assert templating._worded(game) != templating._worded(room)
    assert len(evaluated_prompts([game, room])) == 4
