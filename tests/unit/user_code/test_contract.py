"""Environments that were written for TRL run unchanged, and one that breaks the contract is refused in a sentence."""

import json
import runpy

import pytest
from rooms import answers, begun

from rloo_pipeline.errors import UserError
from rloo_pipeline.user_code import contract
from rloo_pipeline.user_code.episode import state_of
from rloo_pipeline.user_code.pool import EnvironmentPool

ECHO = """
# the client of TRL's page on OpenEnv, "Quick start"; the server is this module
class EchoAction:
    def __init__(self, message): self.message = message
class EchoEnv:
    def __init__(self, base_url): assert base_url.startswith("https://")
    def step(self, action):
        seen = type("Observation", (), {"echoed_message": action.message, "reward": 0.1 * len(action.message)})
        return type("Result", (), {"observation": seen})
"""
ECHO_TOOL = '''
from echo_env import EchoAction, EchoEnv

ENV_URL = "https://an-echo-server.example"

class EchoToolEnv:
    def __init__(self):
        self.env = EchoEnv(base_url=ENV_URL)
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        result = self.env.step(EchoAction(message=message))
        self.reward = result.observation.reward
        return result.observation.echoed_message
'''
TEXTARENA = """
# the client of TRL's page on OpenEnv, "Advanced example: Wordle"; the game is this module
class TextArenaAction:
    def __init__(self, message): self.message = message
def _result(history, reward, done):
    observation = type("Observation", (), {"messages": [type("Message", (), {"content": history})]})
    return type("Result", (), {"observation": observation, "reward": reward, "done": done})
class TextArenaEnv:
    def __init__(self, base_url): self.history = ""
    def reset(self):
        self.history = "Guess a word of five letters."
        return _result(self.history, 0.0, False)
    def step(self, action):
        right = action.message == "[crane]"
        self.history += "\\nYou won." if right else "\\nX X G X Y"
        return _result(self.history, float(right), right)
"""
WORDLE = '''
from textarena_env import TextArenaAction, TextArenaEnv

class WordleEnv:
    def __init__(self):
        self.client = TextArenaEnv(base_url="https://a-wordle-server.example")

    def reset(self, **kwargs) -> str | None:
        result = self.client.reset()
        self._last_full_feedback = result.observation.messages[0].content
        self.reward = 0.0
        self.done = False
        return self._last_full_feedback

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        if self.done:
            raise ValueError("Game over.")
        result = self.client.step(TextArenaAction(message=guess))
        full = result.observation.messages[0].content
        feedback = full[len(self._last_full_feedback):]
        self._last_full_feedback = full
        self.reward = result.reward
        self.done = result.done
        return feedback
'''


def test_two_documented_environments_of_trl_run_unchanged(tmp_path) -> None:
    files = {"echo_env": ECHO, "echo": ECHO_TOOL, "textarena_env": TEXTARENA, "wordle": WORDLE}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    names = {"echo": f"{tmp_path}/echo.py:EchoToolEnv", "wordle": f"{tmp_path}/wordle.py:WordleEnv"}
    row = {"prompt": [{"role": "user", "content": "Play."}]}
    with EnvironmentPool(names, [], 2, 60) as pool:

        def ask() -> list:
            answers = []
            while pool.waiting:
                answers += pool.ready(60)
            return sorted(answers)

        pool.reset(1, row | {"environment": "echo"}, 0)
        pool.reset(2, row | {"environment": "wordle"}, 0)
        assert [answer.texts for answer in ask()] == [(), ("Guess a word of five letters.",)]
        pool.call(1, [("echo", {"message": "Hello World!"})])
        pool.call(2, [("guess", {"guess": guess}) for guess in ("[arise]", "[crane]", "[crane]")])
        echo, wordle = ask()
        assert echo.texts == ("Hello World!",)
        assert wordle.texts == ("\nX X G X Y", "\nYou won.", str({"error": "Game over."}))
        pool.finish(1)
        pool.finish(2)
        # TRL's reward functions read `environment.reward`: the state has it
        assert [json.loads(answer.state)["reward"] for answer in ask()] == [pytest.approx(1.2), 1.0]
        [schema] = pool.schemas({"environment": "wordle"})
        assert schema["function"]["description"] == "Make a guess in the Wordle environment."
        assert schema["function"]["parameters"]["required"] == ["guess"]


def test_a_tool_of_another_library_must_not_hide_what_an_episode_needs() -> None:
    class Session:
        def __init__(self) -> None:
            self.steps = 0

    with pytest.raises(UserError, match="a tool is named steps, which episodes use themselves; rename it"):
        contract.with_tools(Session, {"steps": (lambda self: "", {"name": "steps"})})


def test_environments_and_tools_of_one_file_share_its_variables(tmp_path) -> None:
    file = tmp_path / "store.py"
    file.write_text(
        "STORE = []\ndef tell():\n    return STORE\nclass Shop:\n    def reset(self, **row):\n        STORE.append(1)\n"
    )
    code = contract.load({"": f"{file}:Shop"}, [f"{file}:tell"])
    code.environments[""][1]().reset()
    assert code.tools["tell"][1]() == [1]


JUDGED = """
class Judged:
    def reset(self, **row): pass
    def get_reward(self, completion): return len(completion[-1]["content"])
"""


def test_a_reward_that_names_the_completion_gets_the_messages_after_the_prompt(tmp_path) -> None:
    (tmp_path / "judged.py").write_text(JUDGED)
    with EnvironmentPool(f"{tmp_path}/judged.py:Judged", [], 1, 60) as pool:
        begun(pool, 1)
        pool.finish(1, [{"role": "assistant", "content": "four"}])
        assert [answer.reward for answer in answers(pool)] == [4.0]


PICTURE = '''from {module} import {kind}
from typing import Literal

def picture(number: int, of: Literal["a", "b"], sizes: list[float] | None = None) -> {kind}:
    """Draw it.

    Args:
        number: of the picture
        of: what
        sizes: of its parts

    Returns:
        The picture.
    """
'''


@pytest.mark.parametrize(("module", "kind"), [("PIL.Image", "Image"), ("decimal", "Decimal")])
def test_schemas_are_those_of_transformers_also_of_the_types_that_it_adds(tmp_path, module, kind) -> None:
    """The process that makes schemas imports transformers only for these."""
    from transformers.utils.chat_template_utils import get_json_schema

    file = tmp_path / "draws.py"
    file.write_text(PICTURE.format(module=module, kind=kind))
    with EnvironmentPool(None, [f"{file}:picture"], 1, 60) as pool:
        pool.check()
        [schema] = pool.schemas({})
    assert schema == get_json_schema(runpy.run_path(str(file))["picture"])
    assert (schema["function"]["return"]["type"] == "object") == (module == "decimal")


RESET = "def reset(self, **row): return None"
TOOL = '"""Guess a word.\n\n        Args:\n            word: the word\n        """'


def errors(tmp_path, environment: str | None, *tools: str, text: str) -> str:
    """Why environments and tools in a file with this text are refused."""
    file = tmp_path / "my_env.py"
    file.write_text(text)
    environments = contract.by_name(environment and f"{file}:{environment}")
    with pytest.raises(UserError) as refused:
        contract.tool_sets(contract.load(environments, [f"{file}:{tool}" for tool in tools]))
    return str(refused.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            f"def __init__(self, size): pass\n    {RESET}",
            "Wordle.__init__ needs 'size', and an environment is made with",
        ),
        ("pass", "Wordle has no method reset; add `def reset(self, **row)`"),
        (
            f"{RESET}\n    def guess(self, word):\n        {TOOL}",
            "word is missing a type hint in function guess); give each argument a",
        ),
        (
            f"{RESET}\n    def guess(self, word: str): pass",
            "it has no docstring!); give each argument",
        ),
        (
            f'{RESET}\n    def guess(self, word: str):\n        """Guess a word."""',
            "no description for the argument 'word'); give each argument a type",
        ),
        (
            f"{RESET}\n    def guess(self, word: 'Word'):\n        {TOOL}",
            "Wordle.guess gives no schema (NameError: name 'Word' is not defined)",
        ),
        (
            f"{RESET}\n    def guess(self, word: set[str]):\n        {TOOL}",
            "no schema (TypeHintParsingException: Couldn't",
        ),
    ],
)
def test_an_environment_that_breaks_the_contract_is_named(tmp_path, body, message) -> None:
    refused = errors(tmp_path, "Wordle", text=f"class Wordle:\n    {body}\n")
    assert message in refused
    assert refused.startswith("'my_env.py:Wordle'")


def test_tools_that_break_the_contract_are_named(tmp_path) -> None:
    method = f"class Wordle:\n    {RESET}\n    def guess(self, word: str):\n        {TOOL}\n"
    text = f"def guess(word: str):\n    {TOOL}\n{method}"
    assert "Wordle.guess has the name of one of rollout.tools" in errors(tmp_path, "Wordle", "guess", text=text)
    assert errors(tmp_path, None, "guess", "guess", text=text).endswith("are called guess; rename one of them")
    refused = errors(tmp_path, None, "Wordle", text=text)
    assert (
        refused == "'my_env.py:Wordle': not a function; a tool must be one, and a class belongs in rollout.environment"
    )
    refused = errors(tmp_path, None, "guess", text="def guess(word): pass\n")
    assert refused.startswith("'my_env.py:guess' gives no schema (DocstringParsingException: ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def reset(self, **row): return 3", "Wordle.reset returned 3, which is of type int; return text or None"),
        (
            "def reset(self, answer): pass",
            "Wordle.reset needs a column 'answer', which the dataset lacks; there are pro",
        ),
        ("import nothing_here", "importing .*my_env.py failed with ModuleNotFoundError"),
        ("import os; os._exit(5)", "imports rollout.environment and rollout.tools ended its process with exit code 5"),
    ],
)
def test_an_environment_that_cannot_begin_is_named(tmp_path, body, message) -> None:
    file = tmp_path / "my_env.py"
    file.write_text(f"class Wordle:\n    {body}\n")
    with EnvironmentPool(f"{file}:Wordle", [], 1, 60) as pool:
        pool.reset(1, {"prompt": "x"}, 0)
        with pytest.raises(UserError, match=message):
            pool.ready(600)


def test_a_function_that_makes_an_environment_is_one(tmp_path) -> None:
    file = tmp_path / "my_env.py"
    file.write_text(
        "class Room:\n    def __init__(self, size): self.size = size\n    def reset(self): return f'{self.size} m'\n"
        "    def get_reward(self): return 1\ndef small(): return Room(2)\n"
    )
    code = contract.load(contract.by_name(f"{file}:small"), [])
    assert contract.tool_sets(code) == {"": contract.ToolSet([], True)}
    assert code.environments[""][1]().reset() == "2 m"


def test_the_state_has_what_the_class_sets_and_the_episode_has_not() -> None:
    class Base:
        guesses, highest, score, _hidden = 0, 9, 0, 1

        def guess(self) -> None:
            self.guesses += 1

    class Game(Base):
        solved, note, words, highest = False, None, ["a"], 10

        @property
        def score(self) -> float:
            raise AssertionError("no code runs for it")

    game = Game()
    assert json.loads(state_of(game)) == {"guesses": 0, "highest": 10, "note": None, "solved": False}
    game.guess()
    assert json.loads(state_of(game))["guesses"] == 1
