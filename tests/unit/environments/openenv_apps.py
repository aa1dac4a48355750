"""Servers of OpenEnv for the tests, run by its own Python: a game with actions, and below it one with tools."""

import os
import random
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_app,
)


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class Guessing(Environment):
    """Guess a number; 666 ends the server."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, highest: int = 100, **_: Any) -> Hint:
        self.number = random.Random(seed).randint(1, highest)
        return Hint(hint=f"Guess a number from 1 to {highest}.")

    def step(self, action: Guess, timeout_s=None, **_: Any) -> Hint:
        if action.number == 666:
            os._exit(3)
        if action.number < 0:
            raise ValueError("no such number")
        right = action.number == self.number
        hint = "right" if right else "higher" if action.number < self.number else "lower"
        return Hint(hint=hint, done=right, reward=1.0 if right else -0.125)

    @property
    def state(self) -> State:
        return State()


class Calculating(MCPEnvironment):
    """One tool; its reset says nothing."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("calculator")

        @server.tool
        def calculator(expression: str) -> str:
            """Computes a product."""
            factors = expression.split("*")
            return str(int(factors[0]) * int(factors[1]))

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **_: Any) -> Observation:
        return Observation()

    def _step_impl(self, action, timeout_s=None, **_: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


calculating = create_app(Calculating, CallToolAction, CallToolObservation, max_concurrent_envs=64)
app = create_app(Guessing, Guess, Hint, max_concurrent_envs=2)
app.mount("/calculating", calculating)
