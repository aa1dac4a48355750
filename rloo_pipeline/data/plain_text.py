"""Keeps text as text: special tokens in a rendered chat template come from the template, never from the data.

A tokenizer makes a special token wherever a text spells one, so a user who writes `<|im_end|>` would end the turn.
Texts that spell none, which is nearly all, are encoded as usual. For the others, the template is rendered with a
placeholder for each spelling. A copy of the tokenizer, in which special tokens have names that no text contains, then
encodes the result: the template's own special tokens are renamed to match, and spellings become ordinary tokens. All
else (merges, prefix spaces, spaces that a special token absorbs) is left to the same tokenizer, so ids are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts import policy
from rloo_pipeline.errors import UserError, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Unicode noncharacters around the number of a placeholder."""
RENAMED = "\ufdd2"
"""Unicode noncharacter on both sides of a special token's new name."""


class UnwritableTextError(UserError):
    """A text spells a special token that a tokenizer cannot write as plain text."""


class PlainText:
    """Encodes texts of the data with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, meant: str = "") -> None:
        """Finds the tokenizer's special tokens.

        Args:
            tokenizer: the model's tokenizer; not changed.
            meant: text from the configuration; special tokens spelled in it, except end tokens, stay special
                everywhere.
        """
        self.tokenizer = tokenizer
        named = special_tokens(tokenizer)
        if meant:
            ends = _stop_ids(tokenizer)
            named = {text: id_ for text, id_ in named.items() if text not in meant or id_ in ends}
        self.special = named
        """Ids of the tokens that texts must not produce, by their spelling."""
        self.pattern = re.compile(_pattern(named) if named else r"(?!)")
        self.special_ids = frozenset(named.values())

    def spelled(self, value: Any) -> str | None:
        """The first special token that a text in messages, or in any JSON value, spells; None if there is none."""
        texts: list[str] = []
        self._hidden(value, texts)
        return texts[0] if texts else None

    def ids(self, messages: Any, render: Callable[[Any], str]) -> list[int]:
        """Token ids of messages in a chat template.

        Args:
            messages: messages of the conversation.
            render: returns the text of messages in the template.

        Raises:
            UserError: a text spells a special token that this tokenizer cannot write as plain text, or the tokenizer
                encodes the template's own special tokens as plain text.
        """
        texts: list[str] = []
        hidden = self._hidden(messages, texts)
        if not texts:
            text = render(messages)
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            written = len(self.pattern.findall(text))
            if written > 0 == self._count(ids):
                raise UserError(
                    f"{self.tokenizer.name_or_path}: the tokenizer encodes the special tokens of the chat template as "
                    "plain text, as those of mistral-common do; give the model's folder a tokenizer.json"
                )
            if self._count(ids) <= written:
                return ids
            # a tokenizer may normalize other spellings to a special token, or have it in its vocabulary
        return self._plain_ids(render(hidden), texts)

    def ids_of_text(self, text: str) -> list[int]:
        """Token ids of a text without a template; nothing in it is special.

        Raises:
            UserError: see `ids`.
        """
        texts: list[str] = []
        return self._plain_ids(self._hide(text, texts), texts)

    def _count(self, ids: Iterable[int]) -> int:
        """Number of special tokens among these ids."""
        return sum(map(self.special_ids.__contains__, ids))

    def _hide(self, text: str, texts: list[str]) -> str:
        """Replaces each spelling by a placeholder and appends it to `texts`."""

        def placeholder(match: re.Match[str]) -> str:
            texts.append(match[0])
            return f"{OPEN}{len(texts) - 1}{CLOSE}"

        return self.pattern.sub(placeholder, text)

    def _hidden(self, value: Any, texts: list[str]) -> Any:
        """Applies `_hide` to all texts of a JSON value."""
        if isinstance(value, str):
            return self._hide(value, texts)
        if isinstance(value, Mapping):
            return {self._hidden(key, texts): self._hidden(item, texts) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(item, texts) for item in _joined(value)]
        return value

    def _plain_ids(self, rendered: str, texts: list[str]) -> list[int]:
        """Token ids of a text with placeholders for `texts`; its special tokens are the template's."""
        text, count = self.pattern.subn(lambda match: f"{RENAMED}{match[0]}{RENAMED}", rendered)
        text = re.sub(f"{OPEN}([0-9]+){CLOSE}", lambda match: texts[int(match[1])], text)
        ids = list(self._copy.encode(text, add_special_tokens=False).ids)
        if any(mark in text or f"\\u{ord(mark):x}" in text for mark in (OPEN, CLOSE)) or self._count(ids) > count:
            raise UnwritableTextError(self._refusal("the chat template or the tokenizer changes it", *texts[:1]))
        return ids

    @cached_property
    def _copy(self) -> Tokenizer:
        """The tokenizer with new names for its special tokens."""
        from tokenizers import Tokenizer

        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnwritableTextError(self._refusal("the tokenizer is not one of the library tokenizers"))
        names = {text: f"{RENAMED}{text}{RENAMED}" for text in self.special}
        spec = json.loads(backend.to_str())
        spec |= {"post_processor": None, "truncation": None, "padding": None}
        for token in spec["added_tokens"]:
            if token["content"] in names:
                token |= {"content": names[token["content"]], "normalized": False}
        model = spec["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(piece, piece): id_ for piece, id_ in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        try:
            copy = Tokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the library raises this class, for example if merges make a special token
            raise UnwritableTextError(self._refusal(f"the tokenizer needs it ({one_line(error)})")) from error
        if any(copy.token_to_id(names[text]) != id_ for text, id_ in self.special.items()):
            raise UnwritableTextError(self._refusal("the tokenizer numbers its tokens differently without it"))
        return copy

    def _refusal(self, why: str, spelled: str = "") -> str:
        return (
            f"{self.tokenizer.name_or_path}: a text spells the special token {spelled!r}, which cannot be "
            f"encoded as plain text ({why}); remove it from the text, or in prompts set dataset.split_special_tokens: "
            "false, so that it is special"
        )


def plain_text(tokenizer: PreTrainedTokenizerBase, meant: str = "") -> PlainText:
    """The cached `PlainText` of a tokenizer."""
    return _cached(tokenizer, len(tokenizer), meant)


@lru_cache(maxsize=8)
def _cached(tokenizer: PreTrainedTokenizerBase, size: int, meant: str) -> PlainText:  # noqa: ARG001, a part of the key
    return PlainText(tokenizer, meant)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of a tokenizer's special tokens and of added tokens that end a completion, by their text.

    The token for unknown characters is left out, since it controls nothing.
    """
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    # an end token that was not added, such as a newline, occurs in ordinary text
    ids = sorted({*policy.special_ids(tokenizer), *(_stop_ids(tokenizer) & {*added.values()})})
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    others = {tokenizer.unk_token, getattr(model, "unk_token", None), "", None}
    return {
        text: id_ for id_, text in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True) if text not in others
    }


def _stop_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of the tokens that end a completion, read from the model's folder if the tokenizer came from one."""
    folder = Path(tokenizer.name_or_path or "/nonexistent")
    return {*(policy.Policy(folder).generation_ends or ()), tokenizer.eos_token_id} - {None}


def _joined(values: Iterable[Any]) -> list[Any]:
    """Joins adjacent text parts of a message, as templates do."""
    joined: list[Any] = []
    for is_text, group in groupby(values, key=_is_text):
        parts = list(group)
        together = is_text and len(parts) > 1
        joined += [{**parts[0], "text": "".join(part["text"] for part in parts)}] if together else parts
    return joined


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _pattern(words: Iterable[str]) -> str:
    """A regular expression that matches the longest of these words, as a tree, since there may be thousands."""
    rest = sorted({*words})
    optional = rest[:1] == [""]
    branches = [
        re.escape(first) + _pattern(word[1:] for word in group)
        for first, group in groupby(rest[optional:], key=lambda word: word[0])
    ]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if optional else ''}" if len(branches) > 1 or optional else branches[0]
