"""Trains a model of the demo's family to add, from demonstrations alone, to serve as a teacher."""

from pathlib import Path
from typing import Unpack

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from rloo_pipeline.demo.arithmetic import demonstrations
from rloo_pipeline.demo.character_model import ModelSize, character_tokenizer, save, tiny_qwen3

IGNORED = -100
"""Label of a token that is not trained on."""


def trained_qwen3(
    folder: Path,
    seed: int,
    *,
    steps: int = 300,
    batch_size: int = 64,
    learning_rate: float = 0.005,
    warmup_steps: int = 50,
    threads: int = 1,
    context: int = 256,
    **size: Unpack[ModelSize],
) -> None:
    """Trains a model on sums with their working, and writes it with its tokenizer.

    Args:
        folder: folder to write to.
        seed: seed of the initial weights.
        steps: optimizer steps, each on new demonstrations of the training split.
        batch_size: demonstrations per step.
        learning_rate: peak learning rate of AdamW, which decays linearly to 0.
        warmup_steps: number of steps until the peak. With fewer steps in all, the rate only rises.
        threads: number of CPU threads, fixed so that sums round the same everywhere.
        context: maximum length of prompt and completion together, in tokens.
        size: see `write_qwen3`.
    """
    tiny_qwen3(folder, seed, context=context, **size)
    model, tokenizer = Qwen3ForCausalLM.from_pretrained(folder), character_tokenizer(context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_peak(step, steps, warmup_steps))
    rows = demonstrations("train", steps * batch_size, seed=2, worked_share=1.0, signs="+")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for step in range(steps):
        ids, labels = _batch(tokenizer, rows[step * batch_size : (step + 1) * batch_size])
        logits = model(ids, use_cache=False).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    torch.set_num_threads(before)
    save(folder, model, tokenizer)


def share_of_peak(step: int, steps: int, warmup_steps: int) -> float:
    """The learning rate of a step as a share of its peak."""
    return min((step + 1) / max(warmup_steps, 1), (steps - step) / max(steps - warmup_steps, 1))


def _batch(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, list[dict[str, str]]]]) -> tuple[torch.Tensor, ...]:
    """Token ids, padded on the right, and labels, both [rows, tokens]. Only tokens of completions have labels."""
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) for row in rows
    ]
    answers = [tokenizer(row["completion"][0]["content"] + tokenizer.eos_token)["input_ids"] for row in rows]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels
