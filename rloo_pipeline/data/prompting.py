"""Turns a dataset row into the token ids of its prompt, and a demonstration into its completion."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts import policy
from rloo_pipeline.config import TABLE_COLUMNS, Dataset
from rloo_pipeline.data.kinds import are_messages
from rloo_pipeline.data.plain_text import PlainText, plain_text
from rloo_pipeline.data.rows import Row
from rloo_pipeline.errors import UserError, did_you_mean, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


COMPLETION = "warmstart.sft.completion_column"
TEMPLATE_SECONDS = 10.0
"""Time limit for one prompt in a chat template, which comes with the model and may loop forever."""
DATE = datetime(2024, 7, 26)
"""Today's date for chat templates, since no prompt may depend on the clock; the default of Llama 3.1 and 3.2."""
TEXTS = ("text", "thinking")
"""Types of the parts of messages that templates write; templates of Mistral's reasoning models know the second."""
MOST_CHARACTERS = 10_000_000
"""Maximum length of a prompt in characters; tokenizing takes 80 bytes of memory for each."""


def template_columns(template: str) -> list[str]:
    """The columns that `dataset.user_prompt` names."""
    names = [name for _, name, *_ in Formatter().parse(template) if name is not None]
    return list(dict.fromkeys(name.partition(".")[0].partition("[")[0] for name in names))


def check_columns(columns: Iterable[str], dataset: Dataset, path: str) -> None:
    """Checks that rows with these columns can become prompts.

    Raises:
        UserError: a column that the configuration names does not exist.
    """
    columns = list(columns)
    if dataset.user_prompt is not None:
        key, required = "dataset.user_prompt names it", template_columns(dataset.user_prompt)
    else:
        key, required = "dataset.prompt_column", [dataset.prompt_column]
    for name in required:
        check_column(name, columns, key, path)
    if dataset.image_column is not None:
        check_column(dataset.image_column, columns, "dataset.image_column", path)


def check_names(columns: Iterable[str], dataset: Dataset, path: str) -> None:
    """Checks that no column has a name that a run's own tables use.

    Raises:
        UserError: a column has such a name.
    """
    clash = sorted({*columns} & {*TABLE_COLUMNS} - {dataset.prompt_column, "prompt", "completion"})
    if clash:
        raise UserError(f"{path}: column '{clash[0]}' is a name of the run's own tables; rename it")


def check_column(name: str, columns: Iterable[str], key: str, path: str) -> None:
    """Checks that a column exists.

    Raises:
        UserError: no such column exists; the message names the key of the configuration, and similar columns.
    """
    columns = list(columns)
    if name not in columns:
        hint = did_you_mean(name, columns, 0.8) or f"; there are {', '.join(columns)}"
        raise UserError(f"{path}: no column '{name}' ({key}){hint}")


def prompt_of(row: Row, dataset: Dataset, path: str) -> Any:
    """The prompt of a row: messages, or an unchanged string.

    Args:
        row: all columns of the row.
        dataset: the section `dataset`.
        path: file and row, for messages.

    Raises:
        UserError: a column is missing or null, the template does not fit, or the prompt is neither a string nor a list
            of messages.
    """
    check_columns(row, dataset, path)
    if dataset.user_prompt is not None:
        try:
            fields = [name for _, name, *_ in Formatter().parse(dataset.user_prompt) if name is not None]
            values = {name: Formatter().get_field(name, (), row)[0] for name in fields}
            if empty := [name for name, value in values.items() if value is None or _is_nan(value)]:
                raise UserError(
                    f"{path}: column '{empty[0]}' is null, but dataset.user_prompt needs it; fill it or drop the row"
                )
            prompt: Any = [{"role": "user", "content": dataset.user_prompt.format_map(row)}]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: dataset.user_prompt does not fit the row ({error}); correct one of them (a value inside a "
                "column is {column[key]})"
            ) from error
    else:
        prompt = row[dataset.prompt_column]
        if not isinstance(prompt, str) and not are_messages(prompt):
            raise UserError(
                f"{path}: column '{dataset.prompt_column}' holds {prompt!r:.60}; a prompt must be a string, or a "
                "list of messages with role and content"
            )
        if not isinstance(prompt, str):
            prompt = [*map(_with_text, prompt)]
            _check_contents(prompt, dataset.shows_images, path)
            if prompt[-1]["role"] == "assistant":
                raise UserError(
                    f"{path}: column '{dataset.prompt_column}' ends with a message of the assistant, after which the "
                    "model would begin another one; leave it out (`rloo init` moves it into a column of its own) or, "
                    "for the model to continue it, apply the chat template yourself and give the prompt as text"
                )
    if dataset.system_prompt is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return with_system(messages, dataset.system_prompt)


def _check_contents(messages: Sequence[dict[str, Any]], shows_images: bool, path: str) -> None:
    for message in messages:
        content = message.get("content")
        if content is None:  # some templates write "None", others an empty turn
            raise UserError(
                f"{path}: a message of the role '{message['role']}' has no content; write it, or drop the row"
            )
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        kinds = (str(kind) for part in parts for kind in ([part["type"]] if "type" in part else part))
        unseen = next((kind for kind in kinds if kind not in TEXTS and not (shows_images and "image" in kind)), None)
        if unseen is not None:
            column = "give images in a column of their own, and name it in dataset.image_column"
            raise UserError(
                f"{path}: a message has a part of the type '{unseen}', which the model would not see; "
                + (column if "image" in unseen else "write it as text, or drop the row")
            )


def with_system(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Messages with this system message before them, unless they begin with one."""
    own = [{"role": "system", "content": text}] if not messages or messages[0]["role"] != "system" else []
    return [*own, *messages]


def completion_messages(row: Row, column: str, location: str) -> list[dict[str, Any]]:
    """The messages of a demonstration: one of the assistant, or an episode whose tool calls are answered.

    Raises:
        UserError: the column holds neither a text nor such a list, or the last text is empty.
    """
    completion = row[column]
    messages = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    if isinstance(messages, list):
        messages = [*map(_with_text, messages)]
    if not isinstance(messages, list) or not all(map(_is_turn, messages)) or not _is_episode(messages):
        raise UserError(
            f"{location}: column '{column}' ({COMPLETION}) holds {row[column]!r:.60}; a completion must be a string, a "
            "list with one assistant message, or an episode: messages of the assistant, each call of a tool "
            "({function: {name, arguments}}) with its answer"
        )
    if not messages[-1]["content"].strip():
        raise UserError(
            f"{location}: column '{column}' ({COMPLETION}) ends with an empty text; write it, or drop the row"
        )
    return messages


def _with_text(message: Any) -> Any:
    """A message whose text is empty if it only has calls, as in TRL's data."""
    silent = isinstance(message, dict) and message.get("tool_calls") and message.get("content") is None
    return message | {"content": ""} if silent else message


def _is_turn(message: Any) -> bool:
    """True if a message is text or tool calls of the assistant, or the answer of a tool."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        return False
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        return False
    functions = (isinstance(call, dict) and call.get("function") for call in calls)
    named = all(isinstance(function, dict) and "name" in function for function in functions)
    return message.get("role") in ("assistant", "tool") and named


def _is_episode(messages: Sequence[dict[str, Any]]) -> bool:
    """True if each message of the assistant, except the last one, has calls, and each call has an answer."""
    waiting = 0
    for number, message in enumerate(messages):
        if (message["role"] == "tool") != (waiting > 0):
            return False
        calls = len(message.get("tool_calls") or ()) if message["role"] == "assistant" else waiting - 1
        waiting, last = calls, number == len(messages) - 1
        if message["role"] == "assistant" and (waiting == 0) != last:
            return False
    return bool(messages) and messages[-1]["role"] == "assistant"


def check_question(prompt: Any, path: str) -> None:
    """Raises UserError if the last message of a prompt is empty, as an empty cell of a CSV file makes it."""
    last: Row = prompt[-1] if prompt and not isinstance(prompt, str) else {}
    if last.get("role") == "user" and isinstance(last.get("content"), str) and not last["content"].strip():
        raise UserError(f"{path}: the last message of a prompt is empty; write it, or drop the row")


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def wording(prompt: Any) -> str:
    """The text of a prompt without white space at the ends of lines and texts, which does not make another question."""

    def stripped(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: stripped(item) for key, item in value.items()}
        if isinstance(value, list):
            return [*map(stripped, value)]
        return "\n".join(map(str.rstrip, value.strip().splitlines())) if isinstance(value, str) else value

    return json.dumps(stripped(prompt), sort_keys=True, default=str)


def encode(
    prompt: Any, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, path: str, tools: Sequence[Any] = ()
) -> list[int]:
    """Token ids of a prompt, up to the start of the completion; `tools` are the schemas of the tools that it lists.

    Raises:
        UserError: the chat template fails or is missing, the prompt is empty or too long to be tokenized, it would
            begin with two BOS tokens, a string spells a special token, or the model does not embed a token.
    """
    if isinstance(prompt, str):
        ids = _ids_of_string(prompt, dataset, tokenizer, path)
    else:
        ids = chat_ids(prompt, dataset, tokenizer, path, tools=tools)
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise UserError(
            f"{path}: a prompt begins with two BOS tokens, the row's own and the tokenizer's; "
            f"remove '{tokenizer.bos_token}' from the text"
        )
    if not ids:
        raise UserError(f"{path}: a prompt has no tokens; add text to the row, or drop it")
    check_embedded(ids, tokenizer, path)
    return ids


def chat_ids(
    messages: Any,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    add_generation_prompt: bool = True,
    tools: Sequence[Any] = (),
) -> list[int]:
    """Token ids of messages in the model's chat template (see `render`); text in the messages stays text."""

    def rendered(messages: Any) -> str:
        return render(messages, dataset, tokenizer, path, add_generation_prompt, tools)

    if dataset.split_special_tokens is False:
        return list(tokenizer(rendered(messages), add_special_tokens=False)["input_ids"])
    return guard(dataset, tokenizer).ids(messages, rendered)


def guard(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> PlainText:
    """The encoder that keeps data text plain; configured texts may spell special tokens other than end tokens."""
    return plain_text(tokenizer, "\n".join(filter(None, (dataset.system_prompt, dataset.user_prompt))))


def _ids_of_string(prompt: str, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, path: str) -> list[int]:
    """Token ids of a prompt without a chat template, with the tokens that the tokenizer puts before a text.

    Tokens that it puts after a text, such as EOS, are left out, since the completion follows.
    """
    _check_length(prompt, path)
    before, after = _around_text(tokenizer)
    if dataset.split_special_tokens:
        return [*before, *guard(dataset, tokenizer).ids_of_text(prompt)]
    ids = list(tokenizer(prompt)["input_ids"])
    ids = ids[: len(ids) - after]
    spelled = None if dataset.split_special_tokens is False else guard(dataset, tokenizer).spelled(prompt)
    if spelled is not None and ids[:2] != [tokenizer.bos_token_id] * 2:
        raise UserError(
            f"{path}: a prompt that is a string spells the special token {spelled!r}; set "
            "dataset.split_special_tokens: false if it is meant, as in prompts that a chat template has made, or true "
            "to encode it as plain text"
        )
    return ids


@lru_cache(maxsize=8)
def _around_text(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """The tokens that a tokenizer puts before a text, and the number that it puts after one."""
    whole, bare = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
    start = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    return whole[:start], len(whole) - start - len(bare)


def check_embedded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Checks that the tokenizer's model embeds these tokens.

    Raises:
        UserError: a token has no row in the embedding, for example because it was only added to the tokenizer.
    """
    rows = _embedding_rows(tokenizer.name_or_path)
    if rows is not None and max(ids, default=0) >= rows:
        id_ = max(ids)
        raise UserError(
            f"{path}: token {tokenizer.convert_ids_to_tokens(id_)!r} (id {id_}) has no row in the model's embedding "
            f"({rows} rows); resize the embedding to the tokenizer (`model.resize_token_embeddings`), or use the "
            "tokenizer that belongs to the model"
        )


@lru_cache(maxsize=8)
def _embedding_rows(folder: str) -> int | None:
    """Number of tokens that the model in a folder embeds; None if the folder has no model."""
    return policy.Policy(Path(folder)).vocabulary if folder and (Path(folder) / "config.json").is_file() else None


def _check_length(text: str, path: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise UserError(
            f"{path}: a prompt has {len(text):,} characters, but at most {MOST_CHARACTERS:,} can be tokenized; shorten "
            "the row, or correct the chat template"
        )


def render(
    messages: Any,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    add_generation_prompt: bool = True,
    tools: Sequence[Any] = (),
) -> str:
    """Renders messages in the model's chat template, which lists `tools`.

    Raises:
        UserError: the template is missing, fails, takes longer than TEMPLATE_SECONDS, or writes more than
            MOST_CHARACTERS.
    """
    try:
        with _deadline(TEMPLATE_SECONDS):
            text = tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,  # some templates write a header even for an empty list
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **{**date_of(tokenizer), **dataset.chat_template_kwargs},
            )
    except Exception as error:
        if getattr(tokenizer, "chat_template", None) is None:
            raise UserError(
                f"{path}: the prompt is messages, but the model's tokenizer has no chat template; add "
                "chat_template.jinja to the model's folder, or give prompts of plain text (dataset.prompt_column)"
            ) from error
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(
            f"{path}: the chat template failed on {str(messages)[:80]} ({reason}); correct it or "
            "dataset.chat_template_kwargs"
        ) from error
    _check_length(str(text), path)
    return str(text)


def date_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The variable that makes a chat template write DATE where it would write today's; none if it writes no date."""
    return {"strftime_now": DATE.strftime} if "strftime_now" in str(getattr(tokenizer, "chat_template", None)) else {}


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises TimeoutError if a block takes longer; works only in the main thread, where stages and commands run."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"it took over {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, expire)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
