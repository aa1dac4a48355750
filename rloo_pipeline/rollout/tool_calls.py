"""Reads the tool calls in a turn of the model, with vLLM's parsers.

vLLM's parsers treat a call that they cannot read as text. Here the model gets an error as its answer instead: a turn
has a malformed call if it contains the text with which the chat template begins every call, but no call can be read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.data.tool_template import ToolTemplate, call_message
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.rollout import vllm_internals
from rloo_pipeline.user_code.completion_text import after_thinking

if TYPE_CHECKING:
    from vllm.tool_parsers import ToolParser

AUTO = ("hermes", "qwen3_coder", "llama3_json", "mistral", "glm45", "deepseek_v3", "granite", "pythonic")
"""Parsers that `rollout.tool_parser: auto` tries, in this order."""
EXAMPLES = (("first", {"key": "value"}), ("other", {"word": "text"}))
"""Example calls that a parser must read as the template writes them."""
MALFORMED = "error: this call cannot be read"
TOO_MANY = "error: one call at a time"


class ToolCalls(NamedTuple):
    """The tool calls in a turn of the model."""

    content: str
    """Text before the calls, or all of it if there are none."""
    calls: tuple[tuple[str, dict[str, Any]], ...]
    """Name and arguments of each call."""
    malformed: bool = False
    """True if the turn has a call that cannot be read."""


class CallReader:
    """Reads the calls of one model with one of vLLM's parsers."""

    def __init__(self, template: ToolTemplate, parser: str) -> None:
        """Chooses the parser.

        Args:
            template: the model's template.
            parser: vLLM's name of a parser, or `auto`.

        Raises:
            UserError: the parser does not exist, does not read calls as the template writes them, or the template
                writes none.
        """
        vllm_internals.import_vllm()
        from vllm.tool_parsers import ToolParserManager

        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # malformed calls are not errors of ours
        self.template = template
        self.readers: dict[str, tuple[ToolParser, Any]] = {}
        names = sorted(ToolParserManager.list_registered())
        candidates = AUTO if parser == "auto" else (parser,)
        others = ", ".join(name for name in ("auto", *names) if name not in (parser, *candidates))
        if parser != "auto" and parser not in names:
            raise UserError(
                f"rollout.tool_parser: vLLM has no parser '{parser}'{did_you_mean(parser, names)}; set one of {others}"
            )
        self.texts = [template.turn_text(call_message([example])) for example in EXAMPLES]
        self.name = next((name for name in candidates if self._reads_examples(name)), "")
        if not self.name:
            template.check([])  # raises if the cause is the template, which writes no calls
            tried = f"none of {', '.join(AUTO)} reads" if parser == "auto" else "this parser does not read"
            raise UserError(
                f"rollout.tool_parser: {parser}: {tried} calls as the chat template of {template.name} writes them "
                f"({self.texts[0].strip()!r:.120}); set one of {others}"
            )
        first, other = (after_thinking(text).split() for text in self.texts)
        self.mark = (first[0].partition("{")[0] or first[0]) if first[0] == other[0] else ""
        """Text with which every call begins."""

    def read(self, text: str, schemas: Sequence[dict[str, Any]]) -> ToolCalls:
        """Reads a turn.

        Args:
            text: text of the turn, with special tokens, without its end token.
            schemas: schemas of the tools that the model may call.
        """
        answer = after_thinking(text)
        thinking = text[: len(text) - len(answer)]
        parser, request = self._parser(self.name, schemas)
        extracted = parser.extract_tool_calls(answer, request)
        try:
            calls = tuple((call.function.name, json.loads(call.function.arguments)) for call in extracted.tool_calls)
            json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()  # JSON has no NaN, UTF-8 no lone surrogate
        except (ValueError, RecursionError):
            return ToolCalls(text, (), True)
        if not calls:
            return ToolCalls(text, (), bool(self.mark) and self.mark in answer)
        if not all(isinstance(arguments, dict) for _, arguments in calls):
            return ToolCalls(text, (), True)
        return ToolCalls(thinking + (extracted.content or ""), calls)

    def _parser(self, name: str, schemas: Sequence[dict[str, Any]]) -> tuple[ToolParser, Any]:
        """vLLM's parser for these tools, and a request that lists them."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        key = name + json.dumps(schemas)
        if key not in self.readers:
            messages: Any = [{"role": "user", "content": ""}]
            tools: Any = list(schemas) or None
            request = ChatCompletionRequest(model="", messages=messages, tools=tools)
            make: Any = ToolParserManager.get_tool_parser(name)
            self.readers[key] = make(self.template.tokenizer, request.tools or None), request
        return self.readers[key]

    def _reads_examples(self, name: str) -> bool:
        """True if a parser reads the examples as the template writes them."""
        properties = {key: {"type": "string"} for _, arguments in EXAMPLES for key in arguments}
        parameters = {"type": "object", "properties": properties}
        schemas = [
            {"type": "function", "function": {"name": example, "description": "", "parameters": parameters}}
            for example, _ in EXAMPLES
        ]
        self.name = name
        self.mark = ""
        try:
            return all(
                self.read(text, schemas).calls == (example,) for text, example in zip(self.texts, EXAMPLES, strict=True)
            )
        except Exception:  # any exception: parsers refuse tokenizers without their tokens
            return False
