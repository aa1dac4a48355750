"""The calculator computes arithmetic alone, and Python programs run in the sandbox."""

import random

import pytest
from guess_number import GuessNumber

from rloo_pipeline.environments.tools import calculator, python


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 * (4 + 5)", "27"),
        (" 17/2 ", "8.5"),
        ("-7 // 2", "-4"),
        ("2**10 % 1000", "24"),
        ("(-1)**9999 + 1**9999 + 0**9999", "0"),
        ("12345678901234567890 * 10", "123456789012345678900"),
    ],
)
def test_the_calculator_computes(expression, value) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("3 +", "not an arithmetic expression"),
        ("9**9**9", "too large"),
        ("10.0**999", "too large"),
        ("(-1)**0.5", "not a real number"),
        ("__import__('os').getcwd()", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("True + 1", "only numbers"),
        ("1" * 2000, "over 1000 characters"),
    ],
)
def test_the_calculator_says_what_it_cannot_compute(expression, message) -> None:
    with pytest.raises(ValueError, match=message):
        calculator(expression)


@pytest.mark.usefixtures("machine_sandbox")
def test_python_shows_what_is_printed_and_the_error() -> None:
    assert python("print(2**10)") == "1024\n"
    assert python("x = 1") == "[nothing was printed; exit status 0]"
    shown = python("print('before')\n1 / 0")
    assert shown == (
        'before\nTraceback (most recent call last):\n  File "main.py", line 2, in <module>\n'
        "ZeroDivisionError: division by zero\n"
    )
    for character in "xé字":
        shown = python(f"while True: print('{character}' * 1000)")
        assert shown.endswith("[the program printed too much and was stopped]")


@pytest.mark.usefixtures("machine_sandbox")
def test_python_has_no_network_and_no_files(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    assert "FileNotFoundError" in python(f"print(open({str(secret)!r}).read())")
    assert "PermissionError" in python("import socket; socket.create_connection(('127.0.0.1', 80))")


def test_the_game_is_won_by_halving() -> None:
    random.seed(3)
    game = GuessNumber()
    for _ in range(20):
        assert game.reset(prompt="x") == "Guess a number from 1 to 100."
        assert game.get_reward() == 0.0
        low, high, answer = 1, 100, ""
        while answer != "right":
            guess = (low + high) // 2
            answer = game.guess(guess)
            low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
        assert game.get_reward() == 1.0
    with pytest.raises(ValueError, match=r"The game is over\."):
        game.guess(1)
    assert game.reset(number=5, highest=10) == "Guess a number from 1 to 10."
    for guess in (1, 2, 3, 4, 6, 7, 8, 5):
        game.guess(guess)
    assert game.get_reward() == 0.5
