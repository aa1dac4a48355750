"""Scores with a reward model: any Hugging Face model for sequence classification. It reads the whole conversation in
its own chat template, as in TRL.

The model is loaded once per process, from a folder or the Hub's cache, never from the network. Conversations of similar
length share a batch, padded on the right; padding does not change scores. Special tokens that occur in the text of a
prompt or completion are encoded as plain text. Weights are bfloat16 on a GPU and float32 on a CPU. In the
configuration:

    - function: rloo_pipeline.rewards.model:reward_model
      batch: all      # one process, one model, batches from the whole table
      options: {model: models/my-reward-model}
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts import model_files
from rloo_pipeline.artifacts.prompt_set import content_text
from rloo_pipeline.data.plain_text import UnwritableTextError, plain_text
from rloo_pipeline.data.prompting import date_of
from rloo_pipeline.errors import UserError, counted, one_line
from rloo_pipeline.runtime import devices
from rloo_pipeline.transformers_internals import tokenizer_file
from rloo_pipeline.user_code.completion_text import after_thinking, as_completion, text_of
from rloo_pipeline.user_code.reward_call import score_refused

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rloo_pipeline.runtime.host_copies import HostCopies

REWARD = "reward_model"
LOADED = f"{REWARD}: loaded"
"""Begins a line of the log of a stage whose call has loaded a model."""


@dataclass(eq=False)
class LoadedModel:
    """A reward model on its device, or in host memory after `leave_gpu`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    limit: int
    """Maximum length of a conversation in tokens."""
    pad: int | None
    """Id of the padding token. A model without one gets one conversation at a time."""
    host_copies: HostCopies

    def leave_gpu(self) -> None:
        """Moves the weights to host memory, until `enter_gpu`; does nothing on a CPU."""
        import torch

        if self.device.type == "cuda":
            self.host_copies.take((), [*self.model.parameters(), *self.model.buffers()])
            torch.cuda.empty_cache()

    def enter_gpu(self) -> None:
        """Moves the weights back."""
        self.host_copies.restore()


def reward_model(
    prompts: list[Any],
    completions: list[Any],
    model: str | None = None,
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
    """The model's score for each completion.

    The model cannot read a conversation that exceeds its context, or whose text contains a special token that its
    tokenizer cannot encode as plain text. Such a completion gets 0, or the lowest score among the same prompt's
    completions if that is below 0; it gets None if the model can read no completion of the prompt.

    Args:
        prompts: messages, or strings that the completion continues without a chat template or special tokens.
        completions: strings, or lists of the messages that follow the prompt.
        model: folder of the model, or Hub id of a model in the cache. Default: the one that the run trains from
            preferences (`reward_model` in the configuration).
        revision: commit, tag or branch of a Hub model.
        output: index of the output that is the score; may be omitted if the model has only one output.
        probability: return the sigmoid (one output) or the softmax (several) instead of the logit.
        strip_thinking: show the model only the text after `</think>` in the last message.
        chat_template_kwargs: passed to the model's chat template.
        max_length: maximum length of a conversation in tokens. Default: from the model's configuration.
        max_tokens_per_batch: maximum tokens in a batch, including padding. A longer conversation is a batch by itself.
        dtype: number format of the weights. Default: bfloat16 on a GPU and float32 on a CPU.
        device: `cuda`, `cuda:1`, `cpu`. Default: a GPU if there is one.
        trust_remote_code: run the Python code that comes with the model. Leave this off unless you have read that code.

    Raises:
        UserError: the model cannot be loaded, is not a reward model, or cannot read these conversations.
    """
    import torch

    if model is None:
        raise UserError(
            f"{REWARD}: no model; set the option model to a folder, such as that of a run's own reward model, "
            "results/RUN/reward_model/model"
        )
    loaded = _load(model, revision, _files(model, revision), dtype, device, trust_remote_code)
    loaded.enter_gpu()
    column = _column(loaded.model, model, output)
    limit = min(max_length or loaded.limit, loaded.limit)
    ids: dict[int, list[int]] = {}
    refused: dict[int, str] = {}
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        read = shown(prompt, completion, strip_thinking)
        try:
            encoded = ids_of(loaded.tokenizer, read, model, chat_template_kwargs or {})
        except UnwritableTextError as error:  # a completion must not stop the run
            refused[row] = f"cannot read the conversation: {error}"
            continue
        if 0 < len(encoded) <= limit:
            ids[row] = encoded
        else:
            refused[row] = f"cannot read {len(encoded)} tokens of conversation; its limit is {limit}"
    scores: list[float | None] = [None] * len(completions)
    with torch.inference_mode():
        for batch in _batches(ids, 0 if loaded.pad is None else max_tokens_per_batch):
            logits = _logits(loaded, [ids[row] for row in batch]).float()
            if probability:
                logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)
            for row, value in zip(batch, logits[:, column].tolist(), strict=True):
                scores[row] = value
    return score_refused(scores, refused, prompts)


def _files(path: str, revision: str | None) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of the model's files, since a process that stays must not score with a model that has been
    replaced.
    """
    folder = model_files.here(path, revision) or Path(path)  # of the Hub's cache, named by its commit
    stats = ((str(file), file.stat()) for file in sorted(folder.glob("*")) if file.is_file())
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@lru_cache(maxsize=1)
def _load(
    path: str,
    revision: str | None,
    files: tuple[tuple[str, int, int], ...],  # noqa: ARG001 - a key of the cache
    dtype: str | None,
    device: str | None,
    trust_remote_code: bool,
) -> LoadedModel:
    """Loads a model, or returns the one that was loaded last from the same files."""
    tokenizer_file.prepare_tokenizers()
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from rloo_pipeline.runtime.host_copies import HostCopies

    began = time.monotonic()
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    number_format = dtype or ("bfloat16" if place.type == "cuda" else "float32")
    if number_format not in ("bfloat16", "float16", "float32"):
        raise UserError(f"{REWARD}: dtype must be bfloat16, float16 or float32, not '{number_format}'")
    options: dict[str, Any] = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": True,  # compute nodes have no internet
    }
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, **options)
        model: PreTrainedModel
        model, loading_info = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=getattr(torch, number_format),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # loading_info lists them by name
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"{REWARD}: '{path}' cannot be loaded as a model for sequence classification "
            f"({one_line(error)}); give a folder, or download it first where there is internet: "
            f"hf download {path}"
        ) from error
    model_files.check_loading_info(f"{REWARD}: '{path}'", loading_info)
    settings = model.config.get_text_config()
    settings.use_cache = False
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id
    limit = min(tokenizer.model_max_length, getattr(settings, "max_position_embeddings", None) or sys.maxsize)
    model.to(place).eval()  # type: ignore[arg-type]
    loaded = LoadedModel(model, tokenizer, place, limit, settings.pad_token_id, HostCopies())
    devices.hold_gpu(loaded)
    print(f"{LOADED} {path} in {time.monotonic() - began:.1f} s", flush=True)
    return loaded


def _column(model: PreTrainedModel, path: str, output: int | None) -> int:
    """The index of the output that is the score."""
    count = int(model.config.num_labels or 1)
    if output is None and count == 1:
        return 0
    if not isinstance(output, int) or not 0 <= output < count:
        raise UserError(
            f"{REWARD}: '{path}' has {counted(count, 'output')}, and output is {output!r:.50}; set the option output, "
            f"which a column of this name must not replace, to the index of the score, from 0 to {count - 1}"
        )
    return output


def shown(prompt: Any, completion: Any, strip_thinking: bool) -> Any:
    """Prompt and completion in the form that the model reads: a string, or messages, with `[image]` for each image of
    the prompt.
    """
    text = text_of(completion)
    if strip_thinking:
        text = after_thinking(text).strip()
    if isinstance(prompt, str):
        return prompt + text
    *earlier, last = as_completion(completion, prompt) if isinstance(completion, str) else completion
    asked = [{**one, "content": one["content"] and content_text(one["content"])} for one in prompt]
    return [*asked, *earlier, {**last, "content": text}]


def ids_of(tokenizer: Any, read: Any, path: str, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Tokenizes a string, or messages in the model's chat template. Special tokens in their text are encoded as plain
    text; otherwise a policy could end its turn and write the user's.
    """

    def rendered(messages: Any) -> str:
        try:
            variables = {**date_of(tokenizer), **template_kwargs}
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))
        except Exception as error:
            raise UserError(
                f"{REWARD}: the chat template of '{path}' failed ({type(error).__name__}: {error}); a reward model for "
                "conversations must come with one"
            ) from error

    encoder = plain_text(tokenizer)
    return encoder.ids_of_text(read) if isinstance(read, str) else encoder.ids(read, rendered)


def _batches(ids: Mapping[int, list[int]], most: int) -> Iterator[list[int]]:
    """Yields batches of rows of similar length, with at most `most` padded tokens. The longest come first, so that a
    lack of memory shows at once.
    """
    batch: list[int] = []
    for row in sorted(ids, key=lambda row: -len(ids[row])):
        if batch and (len(batch) + 1) * len(ids[batch[0]]) > most:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _logits(loaded: LoadedModel, ids: list[list[int]]) -> torch.Tensor:
    """Runs the model on conversations. Returns logits [conversations, outputs]."""
    import torch

    longest = max(len(row) for row in ids)
    tokens = torch.tensor([row + [loaded.pad or 0] * (longest - len(row)) for row in ids], device=loaded.device)
    lengths = torch.tensor([len(row) for row in ids], device=loaded.device)
    mask = torch.arange(longest, device=loaded.device) < lengths[:, None]
    logits: torch.Tensor = loaded.model(input_ids=tokens, attention_mask=mask.long()).logits
    return logits
