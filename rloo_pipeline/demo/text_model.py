"""Builds a small Qwen3 for plain text, with random weights and a byte-level BPE tokenizer trained on a corpus.

Text is split as in Qwen's own tokenizers (words with the preceding space, single digits, runs of punctuation), but it
is not normalized, so decoding reproduces every string exactly. `<think>` and `</think>` are ordinary tokens, as in
Qwen3.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rloo_pipeline.data import text_rows
from rloo_pipeline.demo.character_model import END, PAD, START, ModelSize, with_chat, write_qwen3
from rloo_pipeline.errors import UserError, did_you_mean

THINK = ("<think>", "</think>")
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of the pieces within which BPE merges, as in Qwen2 and Qwen3."""


def text_qwen3(
    folder: Path,
    seed: int,
    *,
    corpus: str,
    data_dir: str | None = None,
    columns: Sequence[str] = ("question", "answer"),
    vocab_size: int = 2048,
    context: int = 1024,
    **size: Unpack[ModelSize],
) -> None:
    """Writes an untrained float32 model and its tokenizer. The same seed, options and text give the same bytes.

    Args:
        folder: folder to write to.
        seed: seed of the weights. The tokenizer depends only on the corpus.
        corpus: JSONL file; a relative path is looked up in `data_dir`.
        data_dir: `data_dir` of the configuration, which stage-assets passes.
        columns: columns with the text that the tokenizer is trained on.
        vocab_size: number of tokens, or fewer if the corpus does not yield as many.
        context: maximum length of prompt and completion together, in tokens.
        size: see `write_qwen3`.

    Raises:
        UserError: the corpus is missing, is not JSONL, or lacks a column; the vocabulary is too small for all bytes.
    """
    texts = list(_texts(Path(data_dir or ".") / corpus, columns))
    write_qwen3(folder, seed, bpe_tokenizer(texts, vocab_size, context), **size)


def bpe_tokenizer(texts: Sequence[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with `vocab_size` tokens, trained on these texts."""
    special, alphabet = [PAD, START, END], sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(special) + len(THINK) + len(alphabet)
    if vocab_size < least:
        raise UserError(
            f"model.build_options: vocab_size {vocab_size} is below the {least} that all bytes and special tokens need"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(THINK), special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    # not special, so that decoding for the rewards keeps them
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in THINK])
    return with_chat(tokenizer, context)


def _texts(path: Path, columns: Sequence[str]) -> Iterator[str]:
    """Yields the text of these columns, row by row."""
    try:
        rows = list(text_rows.objects(path))
    except OSError as error:
        raise UserError(
            f"{path}: the corpus (model.build_options.corpus) cannot be read ({error}); "
            "relative paths are looked up in data_dir"
        ) from error
    for _, where, row in rows:
        for column in columns:
            if column not in row:
                hint = did_you_mean(column, row) or f"; it has {', '.join(row)}"
                raise UserError(f"{path}: {where} has no column '{column}' (model.build_options.columns){hint}")
            yield str(row[column])
