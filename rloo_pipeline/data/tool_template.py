"""The model's chat template in a conversation with tools: what follows a call, as token ids.

Sampled tokens are never tokenized again. The tokens between the end of a turn and the next one (the answers of the
tools, and the start of the next turn) are the difference between two renderings of a short conversation, as ids: with
the answers and without. Such a continuation does not depend on what came before, so the template must render a
conversation as the beginning of every longer one; `ToolTemplate.check` refuses others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config import Dataset
from rloo_pipeline.data.prompting import chat_ids, check_embedded, render
from rloo_pipeline.errors import UserError

Message = dict[str, Any]
ASKED: Message = {"role": "user", "content": "1"}
THOUGHT = "<think>thought258</think>"
"""Content of calls in short conversations. It has a thought, since some templates add an empty thought to the last turn
only, but keep a given thought in all turns."""


def call_message(calls: Sequence[tuple[str, dict[str, Any]]], content: str = "") -> Message:
    """The assistant's message with calls of tools, each a name and its arguments, in TRL's form."""
    functions = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": content, "tool_calls": functions}


def answer_messages(names: Sequence[str], texts: Sequence[str]) -> list[Message]:
    """The messages with the answers of tools."""
    return [{"role": "tool", "name": name, "content": text} for name, text in zip(names, texts, strict=True)]


class ToolTemplate:
    """The chat template of a model."""

    def __init__(self, policy: Policy, dataset: Dataset) -> None:
        """Prepares to render conversations.

        Args:
            policy: the model.
            dataset: section of the configuration, for `chat_template_kwargs`.
        """
        self.policy = policy
        self.tokenizer = policy.tokenizer
        self.dataset = dataset
        self.stop_ids = frozenset(policy.stop_ids)
        """Tokens that end a turn."""
        self.name = str(policy.base)

    def render(self, messages: Sequence[Message], next_turn: bool = False, tools: Sequence[Any] = ()) -> str:
        """The text of messages, with the start of the model's next turn if `next_turn`."""
        return render(list(messages), self.dataset, self.tokenizer, self.name, next_turn, tools)

    def continuation(self, names: Sequence[str], texts: Sequence[str]) -> list[int]:
        """The token ids that follow the end token of a turn with calls: the answers, and the start of the next turn.

        Args:
            names: names of the called tools, in the order of the calls.
            texts: their answers.
        """
        before = [ASKED, call_message([(name, {}) for name in names], THOUGHT)]
        return self._difference(before, answer_messages(names, texts))

    @cached_property
    def several_calls(self) -> bool:
        """True if the template can write several calls in one turn."""
        try:
            self.continuation(["a", "b"], ["1", "2"])
        except UserError:
            return False
        return True

    def turn_text(self, message: Message) -> str:
        """The text that the template writes for a message of the model, without the end of the turn."""
        whole = self.render([ASKED, message])
        starts = (self.render([ASKED], next_turn) for next_turn in (True, False))
        start = next((start for start in starts if whole.startswith(start)), None)
        if start is None:
            raise UserError(self._refusal("changes the first message of a conversation when another follows"))
        text = whole[len(start) :]
        ends = [text.rfind(end) for end in self.tokenizer.convert_ids_to_tokens(sorted(self.stop_ids))]
        return text[: max(ends)] if max(ends, default=-1) >= 0 else text

    def check(self, schemas: Sequence[Any]) -> None:
        """Checks that the template writes tools, calls and answers, and changes nothing that came before them.

        Args:
            schemas: schemas of the tools.

        Raises:
            UserError: the template fails one of these checks.
        """
        name, key, value, text = "name123", "key456", "value789", "answer147"
        call, answer = call_message([(name, {key: value})], THOUGHT), answer_messages([name], [text])
        whole = self.render([ASKED, call, *answer])
        shown = {"the call of a tool": (name, key, value), "the answer of a tool": (text,)}
        lacking = next((name for name, parts in shown.items() if any(part not in whole for part in parts)), None)
        listed = self.render([ASKED], True, schemas)
        if any(schema["function"]["name"] not in listed for schema in schemas):
            lacking = "the list of tools"
        if lacking is not None:
            raise UserError(self._refusal(f"leaves out {lacking}"))
        self._difference([ASKED, call], answer)
        self._difference([ASKED, call, *answer, call], answer)

    def _difference(self, before: Sequence[Message], after: Sequence[Message]) -> list[int]:
        """The ids of `after`, with the start of the next turn, that follow the end token of the turn that ends
        `before`.

        With some templates, this end token is the token with which the answer begins, at which the model stops.
        """
        start, whole = self.ids(before), self.ids([*before, *after], True)
        ends = [index + 1 for index, token in enumerate(start) if token in self.stop_ids]
        if ends and not str(self.tokenizer.decode(start[ends[-1] :])).strip():
            start = start[: ends[-1]]
        elif len(whole) > len(start) and whole[len(start)] in self.stop_ids:
            start = [*start, whole[len(start)]]
        else:
            raise UserError(self._refusal("does not end a turn with a call by a token at which the model stops"))
        if whole[: len(start)] != start:
            raise UserError(
                self._refusal("writes earlier turns differently once a tool has answered, as by dropping thoughts")
            )
        return whole[len(start) :]

    def ids(self, messages: Sequence[Message], next_turn: bool = False) -> list[int]:
        """Renders messages with the chat template and returns their token ids. A special token that is spelled out in a
        message stays plain text.
        """
        ids = chat_ids(list(messages), self.dataset, self.tokenizer, self.name, next_turn)
        check_embedded(ids, self.tokenizer, self.name)
        return ids

    def _refusal(self, problem: str) -> str:
        return (
            f"{self.name}: the chat template {problem}, so it cannot be used with rollout.tools or "
            "rollout.environment; name a model with another template, or give its folder a chat_template.jinja that "
            "appends each message and leaves what came before as it was"
        )
