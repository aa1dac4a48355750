"""check: a configuration → one line per thing that a run depends on, in seconds and without an engine.

Model, tokenizer, chat template, data and columns are checked as `stage-assets` and `prompts` check them. Where the run
has tools, a scripted model plays an episode, and every reward function is called as `score` calls it, on a few rows.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline import import_string
from rloo_pipeline.artifacts import model_dims, policy, vision
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.checks.template_lint import TemplateLint
from rloo_pipeline.commands import episode_trial, reward_trial
from rloo_pipeline.commands.episode_trial import EpisodeTrial
from rloo_pipeline.commands.reward_trial import DatasetSample
from rloo_pipeline.config import STAGES, Config, provenance
from rloo_pipeline.config.loading import ConfigArguments
from rloo_pipeline.config.run_set import read_runs
from rloo_pipeline.data import building, images
from rloo_pipeline.data.prompting import completion_messages, encode, prompt_of
from rloo_pipeline.data.rows import Row, read_rows
from rloo_pipeline.errors import UserError
from rloo_pipeline.preflight import Finding, dataset_inputs, model_inputs, places, problems_of, reward_audit, show
from rloo_pipeline.runtime.console import Terminal
from rloo_pipeline.training import policy_model, self_check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATED, WITH_IMAGES = 2000, 100
"""Maximum number of rows of a dataset that are templated and tokenized, and of rows with images; all rows are read."""
BEGUN = 64
"""As `TEMPLATED`, where each row begins an episode."""


class ModelParts(NamedTuple):
    """What of the model is here, as far as it passed its checks."""

    folder: Path | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    processor: Any = None
    """Of images, in a run with images."""
    takes_images: bool = False
    """Whether the model is one of images."""


def check(arguments: ConfigArguments) -> None:
    """Checks everything and prints the findings.

    Args:
        arguments: the configuration.

    Raises:
        UserError: there is a problem.
    """
    started = time.monotonic()
    console = Terminal()
    with tempfile.TemporaryDirectory() as folder:
        problems = show(_all_findings(arguments, Path(folder)), console)
    if problems:
        raise UserError(f"{arguments.file}: {problems} {'problem' if problems == 1 else 'problems'}, see above")
    message = f"No problem found in {time.monotonic() - started:.0f} s; to start the run: {arguments.run_command}"
    console.print(message, soft_wrap=True)


def _all_findings(arguments: ConfigArguments, scratch: Path) -> Iterator[Finding]:
    """The findings of a run; of an experiment those of each arm with its first seed, each problem once."""
    runs = read_runs(arguments.file, tuple(arguments.changes))
    shown = set[Finding]()
    for number, (run, config) in enumerate(runs.configs.items()):
        if runs.experiment and config.seed != runs.experiment.seeds[0]:
            continue
        folder = scratch / str(number)
        folder.mkdir()
        for finding in findings(config, folder):
            if finding not in shown:
                arm = f"{run.split('/')[1]}: " if runs.experiment and shown else ""
                yield finding._replace(subject=f"{arm}{finding.subject}")
            shown.add(finding)


def findings(config: Config, scratch: Path) -> Iterator[Finding]:
    """All findings; checks that need a missing input are left out.

    Args:
        config: of the run.
        scratch: an empty folder, for a model that a function builds.
    """
    yield from _functions(config)
    parts = yield from _model_findings(config, scratch)
    with ExitStack() as stack:
        trial = None
        if config.rollout.uses_tools:
            with problems_of("tools") as problems:
                trial = episode_trial.prepare(stack, config, parts.folder)
            yield from problems
        datasets = yield from _dataset_findings(config, parts, trial)
    yield from reward_trial.findings(config, datasets, parts.folder, parts.tokenizer)
    yield from reward_audit.findings(config, {key: sample.rows for key, sample in datasets.items()})


def _model_findings(config: Config, scratch: Path) -> Generator[Finding, None, ModelParts]:
    """Findings on model, tokenizer and processor; returns what can be used of them: nothing if one has a problem."""
    with problems_of("model") as problems:
        folder = _model(config, scratch)
        yield _model_finding(config, folder)
        for finding in places.machine(config):
            yield finding._replace(ok=True, note=not finding.ok)  # stages may run on another machine
        if folder is None:
            return ModelParts()
        tokenizer, processor = policy.load_tokenizer(folder, config.model.trust_remote_code), None
        yield Finding("tokenizer", True, f"{len(tokenizer)} tokens, end token {tokenizer.eos_token}")
        if config.dataset.shows_images:
            processor = vision.load_processor(folder, config.model.trust_remote_code)
            yield Finding("images", True, f"{type(processor.image_processor).__name__} of the model")
        return ModelParts(folder, tokenizer, processor, vision.takes_images(read_json(folder / "config.json")))
    yield from problems
    return ModelParts()


def _dataset_findings(
    config: Config, parts: ModelParts, trial: EpisodeTrial | None
) -> Generator[Finding, None, dict[str, DatasetSample]]:
    """Findings on each dataset, and on the episodes that were played on its rows; returns those that could be read."""
    datasets: dict[str, DatasetSample] = {}
    for key, source in dataset_inputs.sources(config).items():
        with problems_of(key) as problems:
            place = dataset_inputs.data_place(config, key, source)
            if place is None:
                message = f"{source.name} is not in the Hub's cache yet, so it was not checked"
                yield Finding(key, True, message, note=True)
                continue
            datasets[key] = _read(config, key, read_rows(source, place), place, parts, trial)
            yield _dataset_finding(config, key, datasets[key], parts.folder)
            if trial is not None and key != dataset_inputs.DEMONSTRATIONS:
                yield from episode_trial.findings(trial, key, datasets[key].episodes)
        yield from problems
    prompts = [prompt for dataset in datasets.values() for prompt in dataset.prompts]
    yield from _template_findings(config, prompts, parts)
    return datasets


def _template_findings(config: Config, prompts: list[Any], parts: ModelParts) -> Iterator[Finding]:
    """What is odd about the chat template on prompts of the data."""
    if parts.folder is not None and parts.tokenizer is not None:
        lint = TemplateLint(config, parts.tokenizer, policy.stop_ids(parts.folder, parts.tokenizer))
        for finding in lint.findings(prompts):
            yield Finding("chat template", True, finding.message, note=True)


def _functions(config: Config) -> Iterator[Finding]:
    """Functions that the configuration names and that do not exist, according to the text of their files."""
    sections = {section for stage in STAGES.values() for section in stage.decides}
    for name in provenance.functions(config, sections - {"rewards", "model"}):  # these two are called
        with problems_of("function") as problems:
            import_string.check(name)
        yield from problems


def _model(config: Config, scratch: Path) -> Path | None:
    """The checked folder of the model; None if it is not downloaded yet."""
    folder = model_inputs.model_folder(config)
    if config.model.build is not None:
        folder = scratch / "model"
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # messages of libraries
            building.build(config.model, config.seed, config.data_dir, folder)
    if folder is not None:
        model_inputs.check_model(config, folder)
    return folder


def _model_finding(config: Config, folder: Path | None) -> Finding:
    name = config.model.name_or_path or f"built by {config.model.build}"
    if folder is None:
        message = f"{name} is not in the Hub's cache yet, so neither it nor its tokenizer was checked"
        return Finding("model", True, message, note=True)
    hf_config = read_json(folder / "config.json")
    context = model_dims.context(hf_config) or "unknown"
    checked = self_check.load_or_run(folder, config.model.trust_remote_code, config.dataset.shows_images)
    policy_model.check_adapter(folder, config.model.trust_remote_code, config.update.lora)
    slow = f", {checked.slow}" if checked.slow else ""
    return Finding(
        "model", True, f"{name}: {hf_config.get('model_type')}, context {context}, {config.model.dtype}{slow}"
    )


def _read(
    config: Config, key: str, rows: list[Row], place: str, parts: ModelParts, trial: EpisodeTrial | None
) -> DatasetSample:
    """The rows of a dataset and its first prompts; with a `trial`, prompts list tools and some episodes are played.

    Raises:
        UserError: a column is missing, or a row has no valid prompt.
    """
    dataset_inputs.check_source_columns(config, key, list(rows[0]), place)
    if trial is not None and key != dataset_inputs.DEMONSTRATIONS:
        begun = list(trial.templater.prompt_rows(rows[:BEGUN], place))
        prompts, lengths = [row["prompt"] for row in begun], [len(row["prompt_ids"]) for row in begun]
        return DatasetSample(rows, prompts, lengths, episode_trial.play(trial, _played(config, begun)))
    dataset, column = DatasetSample(rows, [], []), config.dataset.image_column
    if parts.takes_images and column is None:
        images.check_named(rows, place)
    for number, row in enumerate(islice(rows, TEMPLATED if column is None else WITH_IMAGES)):
        location = f"{place}, row {number}"
        prompt = prompt_of(row, config.dataset, location)
        dataset.prompts.append(prompt)
        if column is not None:
            pixels = images.pixels_of(row[column], f"{location}, column '{column}'")
            if parts.processor is not None:
                ids = images.encode(prompt, pixels, config.dataset, parts.processor, location)
                dataset.lengths.append(len(ids.prompt_ids))
            row[column] = pixels if isinstance(row[column], list) else next(iter(pixels), None)  # as rewards get it
        elif parts.tokenizer is not None:
            dataset.lengths.append(len(encode(prompt, config.dataset, parts.tokenizer, location)))
        if key == dataset_inputs.DEMONSTRATIONS and config.warmstart.sft is not None:
            completion_messages(row, config.warmstart.sft.completion_column, location)
    return dataset


def _played(config: Config, begun: list[Row]) -> list[Row]:
    """The rows that an episode is played on: those that rewards are called with, and one of each environment."""
    several = isinstance(config.rollout.environment, dict)
    others = {row["environment"]: row for row in reversed(begun)} if several else {}
    first = begun[: reward_trial.PROMPTS]
    return [*first, *(row for row in others.values() if row not in first)]


def _dataset_finding(config: Config, key: str, dataset: DatasetSample, folder: Path | None) -> Finding:
    """The finding for a dataset that could be read.

    Raises:
        UserError: no prompt is short enough, or the longest one and a completion exceed the model's context.
    """
    message = f"{len(dataset.rows):,} rows of {', '.join(dataset.rows[0])}"
    if not dataset.lengths or folder is None or key == dataset_inputs.DEMONSTRATIONS:
        return Finding(key, True, message)
    limit = config.dataset.max_prompt_length
    short = [length for length in dataset.lengths if length <= limit]
    if not short:
        raise UserError(
            f"{key}: none of the first {len(dataset.lengths):,} prompts is within dataset.max_prompt_length ({limit}), "
            f"the shortest one has {min(dataset.lengths)} tokens; raise it"
        )
    model_inputs.check_context(config, read_json(folder / "config.json"), max(short), key)
    message += f"; prompts of {min(short)} to {max(short)} tokens"
    if len(short) < len(dataset.lengths):
        message += f", {len(dataset.lengths) - len(short):,} longer ones will be dropped"
    if len(dataset.lengths) < len(dataset.rows):
        message += f" (of the first {len(dataset.lengths):,})"
    return Finding(key, True, message)
