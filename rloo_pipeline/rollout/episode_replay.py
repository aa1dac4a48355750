"""Plays episodes of a table again without the model: the calls are those in the file, and what answers is compared.

Tools and environments get the same rows, calls and seeds as in the rollouts. So answers, reward and state are equal
unless a tool depends on something else: the clock, a service, a file that changed, or code that was edited since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.data.tool_template import Message
from rloo_pipeline.rollout import resets
from rloo_pipeline.rollout.episode_loop import check_reset

if TYPE_CHECKING:
    from rloo_pipeline.user_code.connection import Answer
    from rloo_pipeline.user_code.pool import EnvironmentPool

Calls = list[tuple[str, dict[str, Any]]]


class Turn(NamedTuple):
    """The calls of one turn of the model, which were made."""

    calls: Calls
    answers: list[str] | None
    """The answers; None if there was no room for them, so that the file lacks them."""


class ReplayDifference(NamedTuple):
    """Something that came out differently."""

    row: int
    """Row of the table."""
    name: str
    """A tool with its arguments, `reward` or `state`."""
    stored: str
    replayed: str


class Replayed(NamedTuple):
    """Result of a replay."""

    calls: int
    """Number of calls that were made."""
    differences: list[ReplayDifference]
    """Differences by row."""


def turns_of(messages: Sequence[Message], finish_reason: str) -> Iterator[Turn]:
    """The turns of an episode whose calls were made; calls that could not be read were not.

    Args:
        messages: messages after the prompt.
        finish_reason: finish reason of the episode. After `stop`, the calls of a last turn exceeded the limit and were
            not made; after `length`, they were made, but their answers did not fit.
    """
    calls: Calls = []
    for role, group in groupby(messages, key=lambda message: message["role"]):
        if role == "assistant":
            functions = [call["function"] for message in group for call in message.get("tool_calls") or ()]
            calls = [(function["name"], function["arguments"]) for function in functions]
        elif calls:
            yield Turn(calls, [message["content"] for message in group])
            calls = []
    if calls and finish_reason == "length":
        yield Turn(calls, None)


class Replay:
    """Episodes that are played again."""

    def __init__(
        self, pool: EnvironmentPool, rows: Sequence[dict[str, Any]], episodes: Sequence[Mapping[str, Any]]
    ) -> None:
        """Prepares the episodes.

        Args:
            pool: processes for tools and environments.
            rows: for each episode, the row of its prompt with all columns.
            episodes: rows of a table of rollouts, with `messages`, `finish_reason` and what the environment gave.
        """
        self.pool, self.rows, self.episodes = pool, rows, episodes
        self.turns = [list(turns_of(json.loads(row["messages"]), row["finish_reason"])) for row in episodes]
        self.next = [0] * len(episodes)
        """Number of turns of each episode whose calls were answered."""
        self.differences: list[ReplayDifference] = []

    def run(self) -> Replayed:
        """Plays all episodes.

        Raises:
            UserError: the code cannot be imported or breaks the contract, or a `reset` returns something else.
        """
        for index, row in enumerate(self.rows):
            resets.reset(self.pool, index, row)
        while self.pool.waiting:
            for answer in self.pool.ready(resets.POLL_SECONDS):
                self._take(answer)
        calls = sum(len(turn.calls) for turns in self.turns for turn in turns)
        return Replayed(calls, sorted(self.differences, key=lambda difference: difference.row))

    def _take(self, answer: Answer) -> None:
        index, episode = answer.episode, self.episodes[answer.episode]
        if answer.request == "finish":
            self._compare(index, "reward", episode["environment_reward"], answer.reward)
            self._compare(index, "state", episode["environment_state"], answer.state)
            return
        if answer.request == "reset":
            check_reset(self.rows[index], answer)
        else:
            turn = self.turns[index][self.next[index]]
            self.next[index] += 1
            for (name, arguments), stored, text in zip(
                turn.calls, turn.answers or answer.texts, answer.texts, strict=True
            ):
                self._compare(index, f"{name}({json.dumps(arguments, ensure_ascii=False)})", stored, text)
        if self.next[index] < len(self.turns[index]):
            self.pool.call(index, self.turns[index][self.next[index]].calls)
        else:
            self.pool.finish(index, json.loads(episode["messages"]))

    def _compare(self, row: int, name: str, stored: object, replayed: object) -> None:
        if stored != replayed:
            self.differences.append(ReplayDifference(row, name, str(stored), str(replayed)))
