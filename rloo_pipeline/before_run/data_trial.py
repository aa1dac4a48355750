"""Checks a run's datasets for `rloo check`: reads, templates and counts rows as `prompts` and `warmstart` do."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

from rloo_pipeline.artifacts import image_store
from rloo_pipeline.artifacts.prompt_set import as_dataset, rows_of
from rloo_pipeline.before_run import dataset_inputs, episode_trial, model_inputs, reward_trial
from rloo_pipeline.before_run.findings import DatasetSample, Finding, RunInputs, problems_of
from rloo_pipeline.config import Rollout, distillation
from rloo_pipeline.data import prompts_of_round
from rloo_pipeline.data.preferences import preferences
from rloo_pipeline.data.prompting import completion_messages, prompt_of
from rloo_pipeline.data.rows import Row, read_rows
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging.template_lint import TemplateLint
from rloo_pipeline.rollout.templating import PromptParts, Templater, identity, shown
from rloo_pipeline.training import demonstrations

TEMPLATED, BEGUN, WITH_IMAGES = 20_000, 64, 100
"""Maximum number of rows that are turned into prompts: in general, with tools, and with images. All rows are read."""

RARE, UNSEEN = 5, 0.2
"""A column with at most one value for `RARE` evaluated rows counts as sorted if the values that these rows lack make up
more than the share `UNSEEN` of all rows. In random order, the expected share is at most 1 / (e · RARE).
"""


def datasets(inputs: RunInputs) -> Iterator[Finding]:
    """Checks that each dataset can be read and turned into prompts, and that episodes can be played on its rows; sets
    `datasets`.

    Held-out rows are checked before training rows, as in the stage `prompts`.
    """
    config, parts = inputs.config, _parts(inputs)
    sources = config.row_sources
    of_prompts = [key for key in reversed(sources) if key.startswith("dataset.")]
    for key in (*of_prompts, *(key for key in sources if key not in of_prompts)):
        with problems_of(key) as problems:
            place = dataset_inputs.data_place(config.data_dir, key, sources[key])
            if place is None:
                message = f"{sources[key].name} is not in the Hub's cache yet, so it was not checked"
                yield Finding(key, True, message, note=True)
                continue
            rows = read_rows(sources[key], place)
            dataset_inputs.check_source_columns(config, key, list(rows[0]), place)
            if key == "dataset.train":
                teachers = (row.get(distillation.COLUMN) for row in rows)
                distillation.require_teachers(config.algorithm.teacher, teachers, place)
            if key == dataset_inputs.DEMONSTRATIONS:
                _check_demonstrations(inputs, parts, rows, place)
                yield Finding(key, True, _columns(rows))
            elif key in of_prompts:
                yield from _part(inputs, parts, key, rows, place)
            else:
                deque(preferences(rows, place, config.dataset.system_prompt), maxlen=0)
                yield Finding(key, True, _columns(rows))
        yield from problems
    inputs.datasets = {key: inputs.datasets[key] for key in sources if key in inputs.datasets}


def template(inputs: RunInputs) -> Iterator[Finding]:
    """Reports faults of the chat template, tried on prompts of the data."""
    if inputs.model is not None:
        prompts = [prompt for dataset in inputs.datasets.values() for prompt in dataset.prompts]
        lint = TemplateLint(inputs.config, inputs.model.tokenizer, inputs.model.stop_ids)
        for finding in lint.findings(prompts):
            yield Finding("chat template", True, finding.message, note=True)


def first_prompt(inputs: RunInputs) -> Iterator[Finding]:
    """Shows the first training prompt as the model reads it, with its special tokens."""
    train = inputs.datasets.get("dataset.train")
    if train is not None and inputs.model is not None and "prompt_ids" in train.rows[0]:
        text = str(inputs.model.tokenizer.decode(train.rows[0]["prompt_ids"], skip_special_tokens=False))
        yield Finding("first prompt", True, reward_trial.in_one_line(text))


def enough(inputs: RunInputs) -> Iterator[Finding]:
    """Checks that there are at least as many training prompts as a round samples."""
    train = inputs.datasets.get("dataset.train")
    if train is not None:
        with problems_of("dataset.train") as problems:
            dropped = f" ({shown(train.counts)})" if train.counts else ""
            count = train.counts["kept"] if train.is_whole and train.counts else train.read
            prompts_of_round.require_enough(inputs.config.rollout, count, f"dataset.train{dropped}")
        yield from problems


def _parts(inputs: RunInputs) -> PromptParts | None:
    """The run's `PromptParts`; None without a model, or if tools or environments, which change prompts, do not work."""
    if inputs.model is None or (inputs.config.rollout.uses_tools and inputs.trial is None):
        return None
    templater = inputs.trial.templater if inputs.trial is not None else Templater(inputs.config.dataset, inputs.model)
    return PromptParts(templater, inputs.model.config)


def _columns(rows: Sequence[Row]) -> str:
    return f"{len(rows):,} rows of {', '.join(rows[0])}"


def _part(inputs: RunInputs, parts: PromptParts | None, key: str, rows: list[Row], place: str) -> Iterator[Finding]:
    """Checks one part of the dataset.

    Raises:
        UserError: an error that the stage `prompts` would raise too.
    """
    if parts is None or inputs.model is None:
        some = rows[:TEMPLATED]
        prompts = [prompt_of(row, inputs.config.dataset, f"{place}, row {number}") for number, row in enumerate(some)]
        inputs.datasets[key] = DatasetSample(some, prompts, len(rows))
        yield Finding(key, True, _columns(rows))
        return
    name, column = key.removeprefix("dataset."), inputs.config.dataset.image_column
    most = BEGUN if inputs.trial else WITH_IMAGES if column else TEMPLATED
    try:
        parts.add(name, rows[:most], place)
    except UserError:
        if len(rows) <= most:
            raise
        most = len(rows)  # the first rows may all be held out, as when eval is the head of the same file
        parts.add(name, rows, place)
    kept, counts = parts.rows[name], parts.counts[name]
    lengths = [len(row["prompt_ids"]) for row in kept]
    model_inputs.check_context(inputs.config, inputs.model.config, max(lengths), key)
    stored = rows_of(as_dataset(kept, place).data.table)
    if column is not None:
        for row in stored[: reward_trial.PROMPTS]:
            row[column] = _images(parts.templater, row)
    episodes = episode_trial.play(inputs.trial, _played(inputs.config.rollout, stored)) if inputs.trial else ()
    sample = DatasetSample(stored, [row["prompt"] for row in stored], len(rows), counts, episodes)
    inputs.datasets[key] = sample
    yield _finding(key, rows, sample, lengths, most)
    yield from _repeated(key, kept, rows[0])
    if key == "dataset.eval" and inputs.config.evaluation.num_prompts:
        yield from _sorted(key, kept, rows[0], inputs.config.evaluation.num_prompts)
    if inputs.trial is not None:
        yield from episode_trial.findings(inputs.trial, key, episodes)


def _finding(key: str, rows: Sequence[Row], sample: DatasetSample, lengths: Sequence[int], most: int) -> Finding:
    message = f"{_columns(rows)}; prompts of {min(lengths)} to {max(lengths)} tokens"
    dropped = {reason: count for reason, count in sample.counts.items() if reason not in ("rows", "kept")}
    if dropped:
        message += f", {sample.counts['kept']:,} kept, dropped: {shown(dropped)}"
    if not sample.is_whole:
        message += f" (of the first {most:,})"
    return Finding(key, True, message, note=any(reason.startswith("also in") for reason in dropped))


def _sorted(key: str, rows: Sequence[Row], columns: Row, count: int) -> Iterator[Finding]:
    """Notes a column with few values whose first rows lack values that many other rows have."""
    for name in columns:
        parts = (rows[:count], rows)
        first, values = (Counter(row[name] for row in part if isinstance(row.get(name), str | int)) for part in parts)
        unseen = sum(values[value] for value in values.keys() - first.keys())
        if len(values) <= count / RARE and unseen > len(rows) * UNSEEN:
            seen = f"its first {count} rows (evaluation.num_prompts) have {len(first)} of the {len(values)} values of"
            yield Finding(key, True, f"{seen} '{name}', so it looks sorted; shuffle the rows", note=True)
            return


def _repeated(key: str, kept: Sequence[Row], columns: Row) -> Iterator[Finding]:
    """Notes rows that share a prompt but differ in other columns."""
    counts = Counter(map(identity, kept))
    several = {one for one, count in counts.items() if count > 1}
    if not several:
        return
    rows = [row for row in kept if identity(row) in several]
    first = next(row for row in rows if identity(row) == identity(rows[0]) and row is not rows[0])
    differing = [name for name in columns if name in first and first[name] != rows[0][name]]
    message = (
        f"{len(several):,} prompts are in several rows, {len(rows):,} in all, that differ in other columns (such as "
        f"{', '.join(differing)} of {str(rows[0]['prompt'])[:60]!r}); each row is a prompt of its own, so drop rows if "
        "one of them is wrong"
    )
    yield Finding(key, True, message, note=True)


def _images(templater: Templater, row: Row) -> Any:
    """The images of a row in the form that reward functions get."""
    pixels = [image_store.decode(templater.files[digest], "image") for digest in row[image_store.IDS]]
    return next(iter(pixels), None) if templater.single else pixels


def _played(rollout: Rollout, rows: Sequence[Row]) -> list[Row]:
    """The rows to play episodes on: those that rewards get, and one row for each environment."""
    several = isinstance(rollout.environment, dict)
    others = {row["environment"]: row for row in reversed(rows)} if several else {}
    first = rows[: reward_trial.PROMPTS]
    return [*first, *(row for row in others.values() if row not in first)]


def _check_demonstrations(inputs: RunInputs, parts: PromptParts | None, rows: list[Row], place: str) -> None:
    """Checks demonstrations by tokenizing them as `warmstart` does. Without a tokenizer, checks only their format.

    Raises:
        UserError: one cannot be used, or none is left to train on.
    """
    section = inputs.config.warmstart.sft
    if section is None:
        return
    if parts is None:
        for number, row in enumerate(rows):
            completion_messages(row, section.completion_column, f"{place}, row {number}")
        return
    templater = parts.templater
    held_out = [row for name, part in parts.rows.items() if name != "train" for row in part]
    evaluated = demonstrations.evaluated_prompts(held_out)
    demonstrations.tokenized(rows[:TEMPLATED], place, section, templater.template, evaluated, (), templater.tools)
