"""The text of a completion in TRL's two forms."""

from __future__ import annotations

from typing import Any

THINK_START, THINK_END = "<think>", "</think>"


def text_of(completion: Any) -> str:
    """The text of a completion: the string itself, or the content of the last message of a list."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def as_completion(text: str, prompt: Any) -> Any:
    """A completion in TRL's form: the text itself where the prompt is a text, else a message of the assistant."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def after_thinking(text: str) -> str:
    """The text after the last `</think>`; all of it without the tag."""
    return text.rpartition(THINK_END)[2]
