"""prompts: dataset rows → templated, tokenized prompts in Arrow (`train/`, `eval/`) and their counts (`counts.json`).

A prompt_id is a hash of the row's content, so it is the same in every run, whatever the order. The two parts share no
prompt: a training row whose prompt is also an evaluation prompt is dropped. What was dropped and why is counted, never
silent.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.artifacts import policy
from rloo_pipeline.artifacts.files import atomic_folder, read_json, write_json
from rloo_pipeline.config import TABLE_COLUMNS, Config, Dataset
from rloo_pipeline.data.prompting import check_columns, check_names, encode, prompt_of
from rloo_pipeline.data.rows import Row, read_rows
from rloo_pipeline.errors import UserError
from rloo_pipeline.preflight import model_inputs
from rloo_pipeline.runtime.progress import say, track

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COUNTS = "counts.json"


def prompts(config: Config, assets: Path, output: Path) -> None:
    """Writes the prompts of a run into the folder `output`.

    Raises:
        UserError: a column is missing, nothing is left, a prompt would begin with two BOS tokens, a template fails, or
            the longest prompt and completion are more than the model's context.
    """
    places = read_json(assets / "assets.json")
    model = Path(places["model"]["path"])
    tokenizer = policy.load_tokenizer(model, config.model.trust_remote_code)
    held_out, eval_counts = _part("eval", config.dataset, places["eval"]["path"], tokenizer, set())
    seen = {tuple(row["prompt_ids"]) for row in held_out}
    train, train_counts = _part("train", config.dataset, places["train"]["path"], tokenizer, seen)
    longest = max(len(row["prompt_ids"]) for row in (*train, *held_out))
    model_inputs.check_context(config, read_json(model / "config.json"), longest, str(model))
    with atomic_folder(output) as beside:
        for name, rows in (("train", train), ("eval", held_out)):
            _save(rows, beside / name)
        write_json(beside / COUNTS, {"train": train_counts, "eval": eval_counts})
    for name, counts in (("train", train_counts), ("eval", eval_counts)):
        say(f"prompts/{name}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))


def _part(
    name: str, dataset: Dataset, path: str, tokenizer: PreTrainedTokenizerBase, taken: set[tuple[int, ...]]
) -> tuple[list[Row], dict[str, int]]:
    """The kept rows of one part, and how many were kept and dropped."""
    source = getattr(dataset, name)
    rows = read_rows(source, path)
    counts: Counter[str] = Counter(rows=len(rows), kept=0)
    kept: list[Row] = []
    ids: set[str] = set()
    check_columns(rows[0], dataset, path)
    check_names(rows[0], dataset, path)
    for number, row in enumerate(track(rows, f"templating {name}", len(rows))):
        made = _prompt_row(row, dataset, tokenizer, f"{path}, row {number}")
        if len(made["prompt_ids"]) > dataset.max_prompt_length:
            counts["too long"] += 1
        elif made["prompt_id"] in ids:
            counts["duplicates"] += 1
        elif tuple(made["prompt_ids"]) in taken:
            counts["also in eval"] += 1
        else:
            ids.add(made["prompt_id"])
            kept.append(made)
    counts["kept"] = len(kept)
    if not kept:
        why = ", ".join(f"{count} {what}" for what, count in counts.items() if what not in ("rows", "kept"))
        raise UserError(
            f"{path}: no prompt is left in dataset.{name} ({why}); raise dataset.max_prompt_length or check the columns"
        )
    return kept, dict(counts)


def _prompt_row(row: Row, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, path: str) -> Row:
    """A row with its prompt, prompt_ids and prompt_id, and every column it had."""
    prompt = prompt_of(row, dataset, path)
    columns = {key: value for key, value in row.items() if key != dataset.prompt_column or key not in TABLE_COLUMNS}
    identity = hashlib.sha256(
        json.dumps([row, prompt], sort_keys=True, default=str, ensure_ascii=False).encode()
    ).hexdigest()
    return {
        **columns,
        "prompt_id": identity[:16],
        "prompt": prompt,
        "prompt_ids": encode(prompt, dataset, tokenizer, path),
    }


def _save(rows: list[Row], folder: Path) -> None:
    """Arrow through `datasets`; ids are int32, the rest as the rows have it."""
    import datasets

    made = datasets.Dataset.from_list(rows)
    made = made.cast_column("prompt_ids", datasets.List(datasets.Value("int32")))
    made.save_to_disk(str(folder))
