"""From a dataset row to the token ids that a completion continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rloo_pipeline.config import Dataset
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_of(row: Row, dataset: Dataset, path: str) -> Any:
    """The prompt of a row: messages, or a string that passes through as it is."""
    if dataset.user_prompt is not None:
        try:
            prompt: Any = [{"role": "user", "content": dataset.user_prompt.format_map(row)}]
        except KeyError as error:
            raise UserError(
                f"{path}: dataset.user_prompt names the column {error}, the rows have {', '.join(row)}"
            ) from None
    elif dataset.prompt_column not in row:
        near = did_you_mean(dataset.prompt_column, row) or f"; there are {', '.join(row)}"
        raise UserError(f"{path}: no column '{dataset.prompt_column}' (dataset.prompt_column){near}")
    else:
        prompt = row[dataset.prompt_column]
    if dataset.system_prompt is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": dataset.system_prompt}, *messages]


def encode(prompt: Any, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, path: str) -> list[int]:
    """Token ids of a prompt up to where the completion begins.

    Raises:
        UserError: the chat template fails or is missing, the prompt is empty, or it would begin with two BOS tokens.
    """
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
    else:
        try:
            text = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True, **dataset.chat_template_kwargs
            )
        except Exception as error:
            raise UserError(
                f"{path}: the chat template failed on {str(prompt)[:80]} ({type(error).__name__}: {error})"
            ) from error
        ids = list(tokenizer(str(text), add_special_tokens=False)["input_ids"])
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise UserError(
            f"{path}: a prompt begins with two BOS tokens, the row's own and the tokenizer's; "
            f"take '{tokenizer.bos_token}' out of the text"
        )
    if not ids:
        raise UserError(f"{path}: a prompt is empty, so there is nothing to complete")
    return ids
