"""Checks the datasets of a run as `prompts` reads and templates them, for `rloo check`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rloo_pipeline.artifacts import vision
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.commands import episode_trial, reward_trial
from rloo_pipeline.commands.run_inputs import DatasetSample, RunInputs
from rloo_pipeline.config import Config
from rloo_pipeline.data import images
from rloo_pipeline.data.prompting import completion_messages, encode, prompt_of
from rloo_pipeline.data.rows import Row, read_rows
from rloo_pipeline.errors import UserError
from rloo_pipeline.preflight import Finding, dataset_inputs, model_inputs, problems_of

TEMPLATED, WITH_IMAGES = 2000, 100
"""Maximum number of rows of a dataset that are templated and tokenized, and of rows with images; all rows are read."""
BEGUN = 64
"""As `TEMPLATED`, where each row begins an episode."""


def datasets(inputs: RunInputs) -> Iterator[Finding]:
    """Each dataset can be read and becomes prompts, and episodes can be played on its rows; sets `datasets`."""
    config = inputs.config
    for key, source in dataset_inputs.sources(config).items():
        with problems_of(key) as problems:
            place = dataset_inputs.data_place(config, key, source)
            if place is None:
                message = f"{source.name} is not in the Hub's cache yet, so it was not checked"
                yield Finding(key, True, message, note=True)
                continue
            inputs.datasets[key] = _read(inputs, key, read_rows(source, place), place)
            yield _finding(inputs, key, inputs.datasets[key])
            if inputs.trial is not None and key != dataset_inputs.DEMONSTRATIONS:
                yield from episode_trial.findings(inputs.trial, key, inputs.datasets[key].episodes)
        yield from problems


def _read(inputs: RunInputs, key: str, rows: list[Row], place: str) -> DatasetSample:
    """The rows of a dataset and its first prompts; in a run with tools, prompts list them and some episodes are played.

    Raises:
        UserError: a column is missing, or a row has no valid prompt.
    """
    config, trial = inputs.config, inputs.trial
    dataset_inputs.check_source_columns(config, key, list(rows[0]), place)
    if trial is not None and key != dataset_inputs.DEMONSTRATIONS:
        begun = list(trial.templater.prompt_rows(rows[:BEGUN], place))
        prompts, lengths = [row["prompt"] for row in begun], [len(row["prompt_ids"]) for row in begun]
        return DatasetSample(rows, prompts, lengths, episode_trial.play(trial, _played(config, begun)))
    dataset, column = DatasetSample(rows, [], []), config.dataset.image_column
    if column is None and inputs.folder is not None and vision.takes_images(read_json(inputs.folder / "config.json")):
        images.check_named(rows, place)
    for number, row in enumerate(islice(rows, TEMPLATED if column is None else WITH_IMAGES)):
        location = f"{place}, row {number}"
        prompt = prompt_of(row, config.dataset, location)
        dataset.prompts.append(prompt)
        if column is not None:
            pixels = images.pixels_of(row[column], f"{location}, column '{column}'")
            if inputs.processor is not None:
                ids = images.encode(prompt, pixels, config.dataset, inputs.processor, location)
                dataset.lengths.append(len(ids.prompt_ids))
            row[column] = pixels if isinstance(row[column], list) else next(iter(pixels), None)  # as rewards get it
        elif inputs.tokenizer is not None:
            dataset.lengths.append(len(encode(prompt, config.dataset, inputs.tokenizer, location)))
        if key == dataset_inputs.DEMONSTRATIONS and config.warmstart.sft is not None:
            completion_messages(row, config.warmstart.sft.completion_column, location)
    return dataset


def _played(config: Config, begun: list[Row]) -> list[Row]:
    """The rows that an episode is played on: those that rewards are called with, and one of each environment."""
    several = isinstance(config.rollout.environment, dict)
    others = {row["environment"]: row for row in reversed(begun)} if several else {}
    first = begun[: reward_trial.PROMPTS]
    return [*first, *(row for row in others.values() if row not in first)]


def _finding(inputs: RunInputs, key: str, dataset: DatasetSample) -> Finding:
    """The finding for a dataset that could be read.

    Raises:
        UserError: no prompt is short enough, or the longest one and a completion exceed the model's context.
    """
    message = f"{len(dataset.rows):,} rows of {', '.join(dataset.rows[0])}"
    if not dataset.lengths or inputs.folder is None or key == dataset_inputs.DEMONSTRATIONS:
        return Finding(key, True, message)
    limit = inputs.config.dataset.max_prompt_length
    short = [length for length in dataset.lengths if length <= limit]
    if not short:
        raise UserError(
            f"{key}: none of the first {len(dataset.lengths):,} prompts is within dataset.max_prompt_length ({limit}), "
            f"the shortest one has {min(dataset.lengths)} tokens; raise it"
        )
    model_inputs.check_context(inputs.config, read_json(inputs.folder / "config.json"), max(short), key)
    message += f"; prompts of {min(short)} to {max(short)} tokens"
    if len(short) < len(dataset.lengths):
        message += f", {len(dataset.lengths) - len(short):,} longer ones will be dropped"
    if len(dataset.lengths) < len(dataset.rows):
        message += f" (of the first {len(dataset.lengths):,})"
    return Finding(key, True, message)
