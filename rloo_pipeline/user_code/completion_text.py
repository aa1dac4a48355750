"""The text of a completion, which TRL represents as a string or as a list of messages."""

from typing import Any

THINK_START, THINK_END = "<think>", "</think>"


def text_of(completion: Any) -> str:
    """The text of a completion: the string itself, or the content of the last message of a list."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def as_completion(text: str, prompt: Any) -> Any:
    """A completion in TRL's form: a string if the prompt is a string, otherwise a list with one assistant message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def after_thinking(text: str) -> str:
    """The text after the last `</think>`, or the whole text if it has no such tag."""
    return text.rpartition(THINK_END)[2]
