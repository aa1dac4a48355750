"""Builds a Qwen3 with a quarter of a million random weights and a character tokenizer, as a Hugging Face model folder.

Every character of the arithmetic task is one token. `<think>` and `</think>` are ordinary tokens, not special ones, so
that decoding keeps them.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, Unpack

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rloo_pipeline.runtime.import_shims import hidden_packages

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
WORDS = ["system", "user", "assistant", "<think>", "</think>"]
CHARACTERS = "\n0123456789+-=;"
UNKNOWN = "<unk>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ ('' if loop.first else '\n') + '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with the newline before each message, so that a conversation ends with the end token."""

TOOL_WORDS = [
    *("tool", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"),
    *("calculator", '{"name": "calculator", "arguments": {"expression": "', '"}}', "error"),
]
"""More tokens for the demo with a tool: each fixed part of a call is one token."""
TOOL_CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}"
    "{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}{{ '</tools><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ ('' if loop.first else '\n') + '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'tool' %}{{ '<tool_response>' + message['content'] + '</tool_response>' }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with tools, with calls in the format of Hermes and Qwen."""


Extra = Sequence[str] | dict[str, str]
"""More special tokens, as a list or by name."""


class ModelSize(TypedDict, total=False):
    """Sizes of a model. Defaults are those of `write_qwen3`."""

    hidden_size: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate_size: int
    initializer_range: float


def tiny_qwen3(folder: Path, seed: int, *, context: int = 256, **size: Unpack[ModelSize]) -> None:
    """Writes an untrained float32 model and its tokenizer to `folder`. The same arguments give the same bytes.

    Args:
        folder: folder to write to.
        seed: seed of the weights.
        context: maximum length of prompt and completion together, in tokens.
        size: see `write_qwen3`.
    """
    write_qwen3(folder, seed, character_tokenizer(context), **size)


def tool_qwen3(folder: Path, seed: int, *, context: int = 256, **size: Unpack[ModelSize]) -> None:
    """Writes `tiny_qwen3` with a chat template for tools and tokens for calls of a calculator.

    Args:
        folder: folder to write to.
        seed: seed of the weights.
        context: maximum length of prompt and completion together, in tokens.
        size: see `write_qwen3`.
    """
    tokenizer = character_tokenizer(context, TOOL_WORDS, "*.")
    tokenizer.chat_template = TOOL_CHAT_TEMPLATE
    write_qwen3(folder, seed, tokenizer, **size)


def write_qwen3(
    folder: Path,
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int = 96,
    layers: int = 2,
    heads: int = 3,
    key_value_heads: int = 1,
    head_dim: int = 32,
    intermediate_size: int = 288,
    initializer_range: float = 0.05,
) -> None:
    """Writes an untrained float32 model with the tokenizer's vocabulary and context, and the tokenizer."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    save(folder, model, tokenizer)


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes a model and its tokenizer. The model is set to sample, and to stop at the tokenizer's end token."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    with hidden_packages("deepspeed"):  # which takes seconds to import, to see that it does not wrap the model
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def character_tokenizer(context: int = 256, words: Sequence[str] = (), characters: str = "") -> PreTrainedTokenizerFast:
    """Returns a tokenizer in which each role, think tag, given word and character is one token."""
    pieces = [*WORDS, *map(re.escape, sorted(words, key=len, reverse=True))]
    tokenizer = word_level_tokenizer([*WORDS, *CHARACTERS, *words, *characters], pieces)
    return with_chat(tokenizer, context, unk_token=UNKNOWN)


def word_level_tokenizer(tokens: Sequence[str], pieces: Sequence[str]) -> Tokenizer:
    """A tokenizer with these tokens after the special ones. A piece, given as a regular expression, or else a character
    is looked up as a whole.
    """
    vocabulary = dict.fromkeys([PAD, START, END, UNKNOWN, *tokens])
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*pieces, r"[\s\S]"])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def with_chat(
    tokenizer: Tokenizer, context: int, template: str = CHAT_TEMPLATE, extra: Extra = (START,), **special_tokens: str
) -> PreTrainedTokenizerFast:
    """Wraps a tokenizer and adds a chat template, an end token, a padding token and other special tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=extra if isinstance(extra, dict) else [*extra],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        padding_side="left",
        **special_tokens,
    )
