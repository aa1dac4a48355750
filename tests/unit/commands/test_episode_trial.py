"""`rloo check` plays an episode with a scripted model: what a user does wrong is a sentence before an engine starts."""

import json
from contextlib import ExitStack

import pytest
from guess_number import GAME
from helpers import merged, mini

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import episode_trial
from rloo_pipeline.before_run.findings import Finding
from rloo_pipeline.commands.check import findings
from rloo_pipeline.config import Config
from rloo_pipeline.demo.character_model import (
    TOOL_CHAT_TEMPLATE,
    TOOL_WORDS,
    character_tokenizer,
    tool_qwen3,
    write_qwen3,
)
from rloo_pipeline.errors import UserError

SIZE = {"hidden_size": 32, "layers": 1, "heads": 1, "key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}
ACT = '"""Act.\n\n        Args:\n            number: what\n        """\n        '
RESET = "def reset(self, **row): return None"
ROOM = f"class Room:\n    {RESET}\n    def act(self, number: int):\n        {ACT}"
REWARDS = """
def seen(environments, environment_reward, completions):
    return [one.guesses + len(messages) for one, messages in zip(environments, completions, strict=True)]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose tokenizer has all of ASCII, with a chat template for tools."""
    folder = tmp_path_factory.mktemp("models") / "ascii"
    tokenizer = character_tokenizer(512, TOOL_WORDS[:7], "".join(map(chr, range(32, 127))))
    tokenizer.chat_template = TOOL_CHAT_TEMPLATE
    write_qwen3(folder, 0, tokenizer, **SIZE)
    return folder


def config(tmp_path, model, **changes) -> Config:
    rows = [{"question": str(number), "answer": str(number)} for number in range(5)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = mini()
    del base["warmstart"]
    base |= {"model": {"name_or_path": str(model), "dtype": "float32"}, "data_dir": str(tmp_path), "evaluation": {}}
    base["dataset"] = {"train": {"path": "train.jsonl"}, "eval": {"path": "test.jsonl"}, "user_prompt": "{question}"}
    return Config(**merged(base, changes))


def finding_of_trial(settings: Config, model) -> Finding:
    """The finding about the first row's episode."""
    with ExitStack() as stack:
        trial = episode_trial.prepare(stack, settings, Policy(model))
        rows = list(trial.templater.prompt_rows([{"question": "1", "answer": "1"}], "train.jsonl"))
        [finding] = episode_trial.findings(trial, "dataset.train", episode_trial.play(trial, rows))
    return finding


def test_tools_environment_and_rewards_are_tried_together(tmp_path, model) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    rollout = {
        "environment": {"game": GAME, "room": f"{tmp_path}/room.py:Room"},
        "tools": ["rloo_pipeline.environments.tools:calculator"],
        "max_completion_length": 400,
    }
    (tmp_path / "room.py").write_text(ROOM + "return number\n")
    settings = config(tmp_path, model, rollout=rollout, rewards=[{"function": f"{tmp_path}/mine.py:seen"}])
    for name, kind in (("train", "game"), ("test", "room")):
        rows = [{"question": str(number), "answer": "1", "environment": kind, "number": 7} for number in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    by_subject = {f"{finding.subject} {number}": finding for number, finding in enumerate(findings(settings, scratch))}
    texts = {
        key.rpartition(" ")[0]: finding.message
        for key, finding in by_subject.items()
        if finding.ok and not finding.note
    }
    assert texts["episode game"] == (
        "on a row of dataset.train: reset says 'Guess a number from 1 to 100.'; calculator(expression='1') gives '1'; "
        "guess(number=1) gives 'higher'; the reward is 0"
    )
    assert texts["episode room"] == (
        "on a row of dataset.eval: calculator(expression='1') gives '1'; act(number=1) gives '1'"
    )
    rewards = [one for key, one in by_subject.items() if key.startswith("reward seen")]
    # an answer alone is 1 message; with two calls and their answers 5; and one guess each
    assert "the data's own solutions 2, 2, 2, 2; 'I do not know.' 6, 6, 6, 6" in rewards[0].message
    assert "has no attribute 'guesses'" in rewards[1].message
    # 15 tokens of the template, 15 letters of the tools' names, the question, and 29 that `reset` says
    assert "prompts of 60 to 60 tokens" in texts["dataset.train"]


@pytest.mark.parametrize(
    ("text", "ok", "message"),
    [
        (f"{ROOM}import os; os._exit(5)", False, "act ended its process with exit code 5"),
        (f"{ROOM}import time; time.sleep(999)", False, "act took over 5 s"),
        (f"{ROOM}return 'x' * 10_000_000", True, "it is longer than rollout.max_completion_length (48)"),
        (f"{ROOM}raise OSError('no door')", True, "act(number=1) gives \"{'error': 'no door'}\""),
        (f"{ROOM}return number\n    def get_reward(self): return 1 / 0", False, "get_reward of '"),
    ],
)
def test_the_finding_says_what_a_tool_did_in_the_trial(tmp_path, model, text, ok, message) -> None:
    (tmp_path / "room.py").write_text(f"{text}\n")
    rollout = {"environment": f"{tmp_path}/room.py:Room", "environment_timeout": 5.0 if "sleep" in text else 60.0}
    finding = finding_of_trial(config(tmp_path, model, rollout=rollout), model)
    assert finding.ok is ok
    assert message in finding.message


def test_a_parser_that_reads_no_call_gives_a_one_line_error(tmp_path, model) -> None:
    rollout = {"tools": ["rloo_pipeline.environments.tools:calculator"], "tool_parser": "mistral"}
    with ExitStack() as stack, pytest.raises(UserError, match="tool_parser: mistral"):
        episode_trial.prepare(stack, config(tmp_path, model, rollout=rollout), Policy(model))


def test_a_tokenizer_that_cannot_write_a_call_gives_a_one_line_error(tmp_path) -> None:
    model = tmp_path / "model"
    tool_qwen3(model, 0, **SIZE)
    rollout = {"environment": GAME}
    finding = finding_of_trial(config(tmp_path, model, rollout=rollout), model)
    assert not finding.ok
    assert finding.message.startswith("the model cannot call guess: the chat template writes ")


@pytest.mark.parametrize("has_model", [False, True], ids=["a model on the Hub", "a template without calls"])
def test_what_needs_episodes_is_not_a_problem_where_none_could_be_played(has_model, tmp_path) -> None:
    folder = tmp_path / "model"
    if has_model:
        write_qwen3(folder, 0, character_tokenizer(512, (), "".join(map(chr, range(32, 127)))), **SIZE)
    name = str(folder) if has_model else "org/not-fetched"
    reward = {"function": "rloo_pipeline.rewards.from_environment:environment_reward", "name": "game"}
    rollout = {"environment": GAME, "num_generations": 2, "generation_batch_size": 4, "shards": 1}
    settings = config(tmp_path, name, rollout=rollout, rewards=[reward], correct={"threshold": 0.5})
    (tmp_path / "scratch").mkdir()
    results = list(findings(settings, tmp_path / "scratch"))
    problems = {finding.subject: finding.message for finding in results if not finding.ok}
    assert problems.keys() == ({"tools"} if has_model else set())
    assert all("the chat template leaves out the call of a tool" in message for message in problems.values())
    [game] = [finding.message for finding in results if finding.subject == "reward game"]
    assert game.endswith("it was not called, because no episode could be played")
