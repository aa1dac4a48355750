"""prompts: dataset rows → templated, tokenized prompts in Arrow (`train/`, `dev/`, `eval/`) and counts (`counts.json`).

With tools, prompts list them and end with what `reset` of their environment said; `tools.json` has the tools.

A prompt_id is a hash of the row's content, so it is the same in every run and in any order. A training row whose prompt
is also a held-out one is dropped, and a row of dev whose prompt is also in eval. Dropped rows are counted by reason.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from rloo_pipeline.artifacts import assets as asset_files
from rloo_pipeline.artifacts import policy
from rloo_pipeline.artifacts.files import atomic_folder, read_json, write_json, write_manifest
from rloo_pipeline.artifacts.prompt_set import TOOLS
from rloo_pipeline.config import Config
from rloo_pipeline.data.prompting import check_columns, check_names
from rloo_pipeline.data.rows import Row, read_rows
from rloo_pipeline.errors import UserError
from rloo_pipeline.preflight import model_inputs
from rloo_pipeline.rollout import beginnings
from rloo_pipeline.rollout.templating import Templater
from rloo_pipeline.runtime.progress import say, track

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
    places = asset_files.read(assets, "model", "eval", "train", weights=False)
    model = Path(places["model"]["path"])
    tokenizer = policy.load_tokenizer(model, config.model.trust_remote_code)
    rows: dict[str, list[Row]] = {}
    counts: dict[str, dict[str, int]] = {}
    held_out: dict[tuple[int, ...], str] = {}
    with ExitStack() as stack:
        uses_tools = config.rollout.uses_tools
        pool = stack.enter_context(beginnings.pool_of(config.rollout)) if uses_tools else None
        several = isinstance(config.rollout.environment, dict)
        templater = Templater(config.dataset, tokenizer, policy.stop_ids(model, tokenizer), pool, several)
        for name in reversed(config.dataset.parts):  # training rows come last
            rows[name], counts[name] = _part(name, templater, places[name]["path"], held_out)
            held_out |= {tuple(row["prompt_ids"]): name for row in rows[name]}
    longest = max(len(row["prompt_ids"]) for part in rows.values() for row in part)
    model_inputs.check_context(config, read_json(model / "config.json"), longest, str(model))
    with atomic_folder(output) as temporary:
        for name, part in rows.items():
            _save(part, temporary / name)
        write_json(temporary / COUNTS, counts)
        if uses_tools:
            write_json(temporary / TOOLS, templater.tools)
        write_manifest(temporary)
    for name in config.dataset.parts:
        say(f"prompts/{name}: " + ", ".join(f"{count} {what}" for what, count in counts[name].items()))


def _part(
    name: str, templater: Templater, path: str, held_out: dict[tuple[int, ...], str]
) -> tuple[list[Row], dict[str, int]]:
    """Templates one part of the dataset, without duplicates and prompts of `held_out`, which names their parts.

    Returns:
        Its rows, and the numbers of rows read, kept, and dropped by reason.
    """
    dataset = templater.dataset
    source = getattr(dataset, name)
    rows = read_rows(source, path)
    counts: Counter[str] = Counter(rows=len(rows), kept=0)
    prompt_rows: list[Row] = []
    ids: set[str] = set()
    check_columns(rows[0], dataset, path)
    check_names(rows[0], dataset, path)
    for prompt_row in track(templater.prompt_rows(rows, path), f"templating {name}", len(rows)):
        if len(prompt_row["prompt_ids"]) > dataset.max_prompt_length:
            counts["too long"] += 1
        elif prompt_row["prompt_id"] in ids:
            counts["duplicates"] += 1
        elif other := held_out.get(tuple(prompt_row["prompt_ids"])):
            counts[f"also in {other}"] += 1
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


def _save(rows: list[Row], folder: Path) -> None:
    """Writes Arrow with `datasets`; token ids are int32, other columns keep their types."""
    import datasets

    table = datasets.Dataset.from_list(rows)
    table = table.cast_column("prompt_ids", datasets.List(datasets.Value("int32")))
    table.save_to_disk(str(folder))
