"""Shared by the tests of environments: an environment in a file, and ways to play it."""

import sys
from pathlib import Path

from rloo_pipeline.user_code.episode_process import Answer
from rloo_pipeline.user_code.pool import EnvironmentPool

ROOM = '''
import asyncio, os, random, signal, socket, subprocess, sys, threading, time
import neighbour

class Room:
    def __init__(self):
        self.entered, self.client, self._hidden = 0, object(), 1

    def reset(self, kind="", **row):
        if kind == "raises":
            raise OSError("no door")
        if kind == "image":
            return [{"type": "image", "image": 1}]
        self.kind, self.draw = kind, random.random()
        return None if kind == "silent" else f"{neighbour.NAME} {sorted(row)}"

    def enter(self, name: str = "", seconds: float = 0.0) -> str:
        """Enter the room.

        Args:
            name: who enters
            seconds: how long it takes
        """
        time.sleep(seconds)
        self.entered += 1
        return f"{name} is number {self.entered}"

    def act(self, code: str) -> str:
        """Do anything.

        Args:
            code: what
        """
        space = {}
        exec(code, globals() | {"self": self}, space)
        return space.get("answer", "")

    async def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: how long
        """
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    async def act_async(self, code: str) -> str:
        """Do anything.

        Args:
            code: what
        """
        return self.act(code)

    def get_reward(self):
        return {"text": "many", "nan": float("nan"), "none": None}.get(self.kind, self.entered / 2)

def double(number: int) -> int:
    """Double a number.

    Args:
        number: which
    """
    return 2 * number

def hang(seconds: float) -> str:
    """Hang.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "back"

def draw() -> str:
    """Draw."""
    return str(random.random())
'''
PLAY = """
from rloo_pipeline.user_code.confinement import Confinement
from rloo_pipeline.user_code.pool import EnvironmentPool
def ask(tool, **arguments):
    pool.call(1, [(tool, arguments)])
    while not (answers := pool.ready(60)): pass
    return answers[0].texts[0]
with EnvironmentPool("{}:Room", [], 1, 1000, Confinement(sandbox={})) as pool:
    pool.reset(1, {{"prompt": "x"}}, 0)
    while not pool.ready(60): pass
    {}
"""


def play(file: Path, code: str, sandbox: bool = False) -> list[str]:
    """A command that begins an episode in a process of its own and runs code, which may `ask` tools of the room."""
    return [sys.executable, "-c", PLAY.format(file, sandbox, code)]


def answers(pool: EnvironmentPool, count: int = 1) -> list[Answer]:
    """The next answers, by episode."""
    received: list[Answer] = []
    while len(received) < count:
        assert pool.waiting
        received += pool.ready(120)
    return sorted(received)


def begun(pool: EnvironmentPool, *episodes: int, seed: int = 7, **columns: str) -> list[Answer]:
    for episode in episodes:
        pool.reset(episode, {"prompt": "x", **columns}, seed)
    return answers(pool, len(episodes))


def finished(pool: EnvironmentPool, *episodes: int) -> list[Answer]:
    for episode in episodes:
        pool.finish(episode)
    return answers(pool, len(episodes))
