"""A small game with a state, as an environment."""

from __future__ import annotations

import random
from typing import Any

GAME = f"{__file__}:GuessNumber"
"""The environment, as a configuration names it."""


class GuessNumber:
    """Guess a number from 1 to `highest`. The dataset may have columns `number` and `highest`."""

    def __init__(self) -> None:
        self.number, self.highest, self.guesses, self.solved = 0, 0, 0, False

    def reset(self, number: int | None = None, highest: int | None = None, **row: Any) -> str:
        """Begins a game.

        Args:
            number: the number to guess. Default: drawn.
            highest: the largest one that it may be. Default: 100.
            row: other columns of the dataset.
        """
        self.highest = highest or 100
        self.number = number or random.randint(1, self.highest)
        self.guesses, self.solved = 0, False
        return f"Guess a number from 1 to {self.highest}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: your guess

        Returns:
            right, higher or lower.
        """
        if self.solved:
            raise ValueError("The game is over.")
        number = int(number)
        self.guesses += 1
        self.solved = number == self.number
        return "right" if self.solved else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        """1 for the number with as few guesses as halving takes at most, less for more; 0 without it."""
        if not self.solved:
            return 0.0
        return min(1.0, self.highest.bit_length() / self.guesses)
