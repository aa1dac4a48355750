"""prompts: dataset rows → templated, tokenized prompts in Arrow (`train/`, `eval/`) and their counts (`counts.json`).

A prompt_id is a hash of the row's content, so it is the same in every run and in any order. A training row whose prompt
is also an evaluation prompt is dropped. Dropped rows are counted by reason.
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
    """Writes the prompts of a run.

    Args:
        config: of the stage.
        assets: folder that `stage-assets` wrote.
        output: folder to write.

    Raises:
        UserError: a column is missing, no prompt is left, a prompt would begin with two BOS tokens, a template fails,
            or the longest prompt and completion exceed the model's context.
    """
    places = read_json(assets / "assets.json")
    model = Path(places["model"]["path"])
    tokenizer = policy.load_tokenizer(model, config.model.trust_remote_code)
    held_out, eval_counts = _part("eval", config.dataset, places["eval"]["path"], tokenizer, set())
    eval_prompts = {tuple(row["prompt_ids"]) for row in held_out}
    train, train_counts = _part("train", config.dataset, places["train"]["path"], tokenizer, eval_prompts)
    longest = max(len(row["prompt_ids"]) for row in (*train, *held_out))
    model_inputs.check_context(config, read_json(model / "config.json"), longest, str(model))
    with atomic_folder(output) as temporary:
        for name, rows in (("train", train), ("eval", held_out)):
            _save(rows, temporary / name)
        write_json(temporary / COUNTS, {"train": train_counts, "eval": eval_counts})
    for name, counts in (("train", train_counts), ("eval", eval_counts)):
        say(f"prompts/{name}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))


def _part(
    name: str, dataset: Dataset, path: str, tokenizer: PreTrainedTokenizerBase, excluded: set[tuple[int, ...]]
) -> tuple[list[Row], dict[str, int]]:
    """Templates one part of the dataset, without duplicates and prompts in `excluded`.

    Returns:
        Its rows, and the numbers of rows read, kept, and dropped by reason.
    """
    source = getattr(dataset, name)
    rows = read_rows(source, path)
    counts: Counter[str] = Counter(rows=len(rows), kept=0)
    prompt_rows: list[Row] = []
    ids: set[str] = set()
    check_columns(rows[0], dataset, path)
    check_names(rows[0], dataset, path)
    for number, row in enumerate(track(rows, f"templating {name}", len(rows))):
        prompt_row = _prompt_row(row, dataset, tokenizer, f"{path}, row {number}")
        if len(prompt_row["prompt_ids"]) > dataset.max_prompt_length:
            counts["too long"] += 1
        elif prompt_row["prompt_id"] in ids:
            counts["duplicates"] += 1
        elif tuple(prompt_row["prompt_ids"]) in excluded:
            counts["also in eval"] += 1
        else:
            ids.add(prompt_row["prompt_id"])
            prompt_rows.append(prompt_row)
    counts["kept"] = len(prompt_rows)
    if not prompt_rows:
        why = ", ".join(f"{count} {what}" for what, count in counts.items() if what not in ("rows", "kept"))
        raise UserError(
            f"{path}: no prompt is left in dataset.{name} ({why}); raise dataset.max_prompt_length or check the columns"
        )
    return prompt_rows, dict(counts)


def _prompt_row(row: Row, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, path: str) -> Row:
    """A row with all its columns and its prompt, prompt_ids and prompt_id."""
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
    """Writes Arrow with `datasets`; token ids are int32, other columns keep their types."""
    import datasets

    table = datasets.Dataset.from_list(rows)
    table = table.cast_column("prompt_ids", datasets.List(datasets.Value("int32")))
    table.save_to_disk(str(folder))
