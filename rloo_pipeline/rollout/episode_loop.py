"""Episodes: completions of several turns, between which tools and environments answer.

An episode is a chain of requests: the prompt of a turn is the first prompt with all tokens since, as ids. Sampled
tokens are appended as they came, answers as the template continues (`data.tool_template`). Each episode advances by
itself, so the engine continues with the others while a tool works. The seed of a turn depends only on its episode and
its number, so the result is the same in whatever order answers arrive. That order decides which requests share a step
of vLLM, and with it the last digits of log-probs.

An episode ends with `stop` when the model calls no tool, or when a call would exceed `max_turns` or
`max_tool_calling_iterations` and is not made. It ends with `length` when the next answer or the model itself needs more
than `max_completion_length` tokens; the answer is then left out. So its last message is always the model's.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rloo_pipeline.artifacts.prompt_set import OBSERVATION
from rloo_pipeline.config import Rollout
from rloo_pipeline.data.tool_template import Message, answer_messages, call_message
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import resets
from rloo_pipeline.rollout.requests import Completion, Request
from rloo_pipeline.rollout.tool_calls import MALFORMED, TOO_MANY, CallReader
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.seeds import derive
from rloo_pipeline.user_code.episode_process import Answer
from rloo_pipeline.user_code.pool import EnvironmentPool

UNREADABLE = "call"
"""Name of the tool in the answer to a malformed call."""


@dataclass
class EpisodeRecord:
    """One episode; `ids`, `mask` and `turns` cover all tokens after the prompt, `logps` only sampled ones."""

    row: dict[str, Any]
    request: Request
    """The first turn; its sampling parameters are those of the episode."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    mask: list[bool] = field(default_factory=list)
    logps: array[float] = field(default_factory=lambda: array("f"))
    turns: list[dict[str, Any]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    called: tuple[str, ...] = ()
    """Names of the tools that were called in the last turn."""
    finish_reason: str = ""
    reward: float | None = None
    state: str | None = None
    calls: int = 0
    """Tool calls that were answered, even if there was no room for the answer."""
    failures: int = 0
    """Tool calls that were answered by an error."""
    lost: str | None = None
    """The reason its environment could not go on."""

    @property
    def model_turns(self) -> int:
        """Number of turns of the model."""
        return sum(turn["role"] == "assistant" for turn in self.turns)

    @property
    def tokens_left(self) -> int:
        """Number of tokens that the episode may still add."""
        return self.request.sampling.max_completion_length - len(self.ids)

    def extend(self, role: str, ids: Sequence[int]) -> None:
        """Appends the tokens of one role, as a turn."""
        self.turns.append({"start": len(self.ids), "end": len(self.ids) + len(ids), "role": role})
        self.ids.extend(ids)
        self.mask += [role == "assistant"] * len(ids)

    def next_request(self) -> Request:
        """The request for the model's next turn."""
        number, seed = self.model_turns, self.request.seed
        return Request(
            [*self.request.prompt_ids, *self.ids],
            seed if number == 0 else derive(seed, "turn", number),
            self.request.sampling._replace(max_completion_length=self.tokens_left),
        )

    def columns(self) -> dict[str, Any]:
        """The episode's columns in the rollouts table, without those of its prompt and its index."""
        return {
            **Completion(self.ids, self.text, self.logps, self.finish_reason).columns(),
            "loss_mask": self.mask,
            "turns": self.turns,
            "messages": json.dumps(self.messages, ensure_ascii=False),
            "environment_reward": self.reward,
            "environment_state": self.state,
            "tool_calls": self.calls,
            "tool_failures": self.failures,
        }


class Episodes:
    """Episodes that are sampled together; implements `requests.RequestSource`."""

    def __init__(
        self,
        settings: Rollout,
        pool: EnvironmentPool,
        reader: CallReader,
        rows: Sequence[dict[str, Any]],
        requests: Sequence[Request],
    ) -> None:
        """Prepares the episodes.

        Args:
            settings: the section `rollout`.
            pool: processes for tools and environments.
            reader: reads the model's calls; its template renders the answers.
            rows: for each episode, the row of its prompt with all columns.
            requests: for each episode, the first turn.
        """
        self.settings, self.pool, self.reader, self.template = settings, pool, reader, reader.template
        self.episodes = [EpisodeRecord(row, request) for row, request in zip(rows, requests, strict=True)]
        self.total = len(self.episodes)
        self.next: list[int] = []
        """Episodes whose next turn can be sampled."""
        for index, episode in enumerate(self.episodes):
            resets.reset(pool, index, episode.row)

    def requests(self, wait: bool) -> Iterable[tuple[int, Request]]:
        """Returns the turns that are ready to be sampled, each with the index of its episode.

        With `wait`, it first waits until one is ready or no episode is left.
        """
        self._read_answers(0.0)
        while self.pool.waiting and wait and not self.next:
            self._read_answers(resets.POLL_SECONDS)
        indices, self.next = self.next, []
        return [(index, self.episodes[index].next_request()) for index in indices]

    def take(self, index: int, completion: Completion) -> bool:
        """Takes the turn that was sampled for an episode; returns True if it was the last one."""
        episode = self.episodes[index]
        episode.extend("assistant", completion.ids)
        episode.text += completion.text
        episode.logps.extend(completion.logps)
        if completion.finish_reason != "stop":
            episode.messages.append({"role": "assistant", "content": completion.text})
            return self._end(index, completion.finish_reason)
        text = self.template.tokenizer.decode([*completion.ids[:-1]], skip_special_tokens=False)
        turn = self.reader.read(str(text), self.pool.schemas(episode.row))
        plain = {"role": "assistant", "content": completion.text}
        too_many = len(turn.calls) > 1 and not self.template.several_calls
        episode.messages.append(call_message(turn.calls, turn.content) if turn.calls and not too_many else plain)
        calls_at_most = self.settings.max_tool_calling_iterations
        limits = (self.settings.max_turns, calls_at_most and calls_at_most + 1)
        if not (turn.calls or turn.malformed) or any(limit and episode.model_turns >= limit for limit in limits):
            return self._end(index, "stop")
        if turn.malformed or too_many:
            episode.called = (UNREADABLE,)
            episode.calls += len(turn.calls)
            episode.failures += len(turn.calls)
            return self._continue(index, [TOO_MANY if too_many else MALFORMED])
        episode.called = tuple(name for name, _ in turn.calls)
        self.pool.call(index, turn.calls)
        return False

    def _continue(self, index: int, texts: Sequence[str]) -> bool:
        """Appends the answers to the calls of an episode; returns True if there is no room for them."""
        episode, template = self.episodes[index], self.template
        ids = template.continuation(episode.called, texts)
        if len(ids) >= episode.tokens_left:
            return self._end(index, "length")
        episode.extend("tool", ids)
        shown = [id_ for id_ in ids if id_ not in template.policy.hidden_ids]
        episode.text += str(template.tokenizer.decode(shown, skip_special_tokens=False))
        episode.messages += answer_messages(episode.called, texts)
        self.next.append(index)
        return False

    def _end(self, index: int, finish_reason: str) -> bool:
        self.episodes[index].finish_reason = finish_reason
        self.pool.finish(index, self.episodes[index].messages)
        return True

    def _read_answers(self, timeout: float) -> None:
        for answer in self.pool.ready(timeout):
            episode = self.episodes[answer.episode]
            if answer.lost:
                episode.lost = answer.lost
                say(f"episode {answer.episode} ({episode.row['prompt_id']}): {answer.lost}")
            if answer.request == "finish":
                episode.reward, episode.state = answer.reward, answer.state
            elif answer.request == "call":
                episode.calls += len(answer.errors)
                episode.failures += sum(answer.errors)
                self._continue(answer.episode, answer.texts)
            else:
                check_reset(episode.row, answer)
                self.next.append(answer.episode)


def check_reset(row: dict[str, Any], answer: Answer) -> None:
    """Checks that `reset` returned the text that the prompt ends with.

    Raises:
        UserError: `reset` failed, or returned a different text than in the stage `prompts`.
    """
    text = resets.observation(answer, row["prompt_id"])
    if text != row.get(OBSERVATION, ""):
        raise UserError(
            f"rollout.environment: reset returned {text!r:.80} for prompt {row['prompt_id']}, but a different text in "
            "the stage `prompts`; let it depend only on the row and on `random`, which is seeded for each row"
        )
