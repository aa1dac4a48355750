"""A learned reward: any Hugging Face model for sequence classification, asked about the conversation in its own chat
template.

The model is loaded once a process, from a folder or from the Hub's cache and never from the network. Conversations are
batched with others of about their length, padded on the right: what stands beside a conversation does not change its
score. bfloat16 on a GPU, float32 on a CPU. In the configuration:

    - function: rloo_pipeline.rewards.model:reward_model
      batch: all      # one process, one model, batches from the whole table
      options: {model: models/my-reward-model}
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.errors import UserError
from rloo_pipeline.scoring.calls import unscored
from rloo_pipeline.scoring.scoring import text_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WHO = "reward_model"


class Loaded(NamedTuple):
    """A reward model in a process."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    limit: int
    """Longest conversation in tokens."""
    pad: int | None
    """What to pad with; a model that knows no such token gets one conversation at a time."""


def reward_model(
    prompts: list[Any],
    completions: list[Any],
    model: str,
    revision: str | None = None,
    output: int | None = None,
    probability: bool = False,
    strip_thinking: bool = False,
    chat_template_kwargs: dict[str, Any] | None = None,
    max_length: int | None = None,
    max_tokens_per_batch: int = 16384,
    dtype: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> list[float | None]:
    """The model's score of each completion; None where prompt and completion are longer than it can read.

    Args:
        prompts: messages, or strings, which the completion continues without a chat template.
        completions: text, or messages of which the last one counts.
        model: folder of the model, or its Hub id once fetched.
        revision: commit, tag or branch of a Hub model.
        output: which of the model's outputs is the score, from 0 on; the only one where not given.
        probability: the score's sigmoid (one output) or its share in the softmax (several) instead of the logit.
        strip_thinking: show only what follows `</think>`.
        chat_template_kwargs: passed to the model's chat template.
        max_length: longest conversation in tokens; what the model's configuration says where not given.
        max_tokens_per_batch: tokens of a batch, padding included; a longer conversation is a batch of its own.
        dtype: number format of the weights; bfloat16 on a GPU and float32 on a CPU where not given.
        device: `cuda`, `cuda:1`, `cpu`; a GPU where there is one, where not given.
        trust_remote_code: run Python code that comes with the model. Off unless you have read that code.

    Raises:
        UserError: the model is not there or is no such model, or it cannot read these conversations.
    """
    import torch

    loaded = _load(model, revision, dtype, device, trust_remote_code)
    column = _column(loaded.model, model, output)
    ids = [
        _encoded(loaded.tokenizer, prompt, _shown(completion, strip_thinking), model, chat_template_kwargs or {})
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    limit = min(max_length or loaded.limit, loaded.limit)
    scores: list[float | None] = [None] * len(ids)
    rows = [row for row in range(len(ids)) if 0 < len(ids[row]) <= limit]
    for row in set(range(len(ids))) - set(rows):
        unscored(row, f"cannot read {len(ids[row])} tokens of conversation; its limit is {limit}")
    with torch.inference_mode():
        for batch in _batches(rows, [len(row) for row in ids], 0 if loaded.pad is None else max_tokens_per_batch):
            logits = _logits(loaded, [ids[row] for row in batch]).float()
            if probability:
                logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)
            for row, value in zip(batch, logits[:, column].tolist(), strict=True):
                scores[row] = value
    return scores


@cache
def _load(path: str, revision: str | None, dtype: str | None, device: str | None, trust_remote_code: bool) -> Loaded:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    number_format = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    if number_format not in ("bfloat16", "float16", "float32"):
        raise UserError(f"{WHO}: dtype must be bfloat16, float16 or float32, not '{number_format}'")
    options: dict[str, Any] = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": True,  # nodes that score have no internet
    }
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, **options)
        model: PreTrainedModel
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, number_format), use_safetensors=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"{WHO}: '{path}' cannot be loaded as a model for sequence classification "
            f"({' '.join(str(error).split())[:200]}); give a folder, or fetch it first where there is internet: "
            f"hf download {path}"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"{WHO}: '{path}' has no weights for {missing[0]}, so it would score at random; take a reward model"
        )
    settings = model.config.get_text_config()
    settings.use_cache = False
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id
    limit = min(tokenizer.model_max_length, getattr(settings, "max_position_embeddings", None) or sys.maxsize)
    return Loaded(model.to(where).eval(), tokenizer, where, limit, settings.pad_token_id)  # type: ignore[arg-type]


def _column(model: PreTrainedModel, path: str, output: int | None) -> int:
    """Which of the model's outputs is the score."""
    count = int(model.config.num_labels or 1)
    if output is None and count != 1:
        raise UserError(f"{WHO}: '{path}' has {count} outputs; say which is the score by the option output, from 0 on")
    if not 0 <= (output or 0) < count:
        raise UserError(f"{WHO}: output {output} is none of the {count} outputs of '{path}', which count from 0")
    return output or 0


def _shown(completion: Any, strip_thinking: bool) -> str:
    text = text_of(completion)
    return text.rpartition("</think>")[2].strip() if strip_thinking else text


def _encoded(tokenizer: Any, prompt: Any, completion: str, path: str, template: dict[str, Any]) -> list[int]:
    """Token ids of a conversation in the model's own template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt + completion)["input_ids"])
    messages = [*prompt, {"role": "assistant", "content": completion}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **template)
    except Exception as error:
        raise UserError(
            f"{WHO}: the chat template of '{path}' failed ({type(error).__name__}: {error}); a reward model for "
            "conversations must come with one"
        ) from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _batches(rows: list[int], lengths: list[int], most: int) -> Iterator[list[int]]:
    """Rows of neighbouring lengths, the longest first (so that too little memory shows at once), of at most `most`
    padded tokens.
    """
    batch: list[int] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > most:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _logits(loaded: Loaded, ids: list[list[int]]) -> torch.Tensor:
    """Outputs of the model, [conversations, outputs]."""
    import torch

    longest = max(len(row) for row in ids)
    tokens = torch.tensor([row + [loaded.pad or 0] * (longest - len(row)) for row in ids], device=loaded.device)
    lengths = torch.tensor([len(row) for row in ids], device=loaded.device)
    mask = torch.arange(longest, device=loaded.device) < lengths[:, None]
    outputs = loaded.model(input_ids=tokens, attention_mask=mask.long())
    logits: torch.Tensor = outputs.logits
    return logits
