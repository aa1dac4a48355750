"""check: a configuration → a line for each thing that a run rests on, in seconds and without an engine.

Model, tokenizer, chat template, data and columns are looked at as `stage-assets` and `prompts` look at them, and every
reward function is called as `score` calls it, on a few rows of the data.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from rloo_pipeline.artifacts import model_dims
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.config import STAGES, Config, Reward, Source, import_string, provenance
from rloo_pipeline.config.loading import ConfigArguments
from rloo_pipeline.data import building
from rloo_pipeline.data.prompting import completion_text, encode, prompt_of
from rloo_pipeline.data.rows import Row, read_rows
from rloo_pipeline.errors import UserError
from rloo_pipeline.preflight import Finding, inputs, places, show
from rloo_pipeline.runtime import devices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rloo_pipeline.scoring.score_batch import RewardBatch

PROMPTS, SAMPLES = 4, 2
"""Rows that a reward function is tried on: of so many prompts, so many completions each."""
TEMPLATED = 2000
"""Rows of a dataset that are templated and tokenized, at most; all are read."""
ANYTHING = "I do not know."
"""A completion that is not of the data."""


class Part(NamedTuple):
    """What was found of one dataset."""

    rows: list[Row]
    prompts: list[Any]
    """Of the first rows."""
    lengths: list[int]
    """Tokens of these prompts; none where there is no tokenizer."""


def check(arguments: ConfigArguments, console: Console | None = None) -> None:
    """Looks at everything and prints what it finds.

    Args:
        arguments: the configuration.
        console: where to print; standard output where not given.

    Raises:
        UserError: there is a problem.
    """
    began = time.monotonic()
    console = console or Console()
    with tempfile.TemporaryDirectory() as folder:
        problems = show(look(arguments.config, Path(folder)), console)
    if problems:
        raise UserError(f"{arguments.file}: {problems} {'problem' if problems == 1 else 'problems'}, see above")
    start = f"snakemake --cores all {arguments.snakemake_arguments}"
    message = f"No problem found in {time.monotonic() - began:.0f} s; to start the run: {start}"
    console.print(message, highlight=False, markup=False, soft_wrap=True)


def look(config: Config, scratch: Path) -> Iterator[Finding]:
    """All findings, one thing after the other; what rests on a thing that is not there is left out.

    Args:
        config: of the run.
        scratch: an empty folder, for a model that a function makes.
    """
    yield from _functions(config)
    try:
        folder = _model(config, scratch)
        yield _of_model(config, folder)
        if config.model.dtype != "float32":
            found = places.number_format(config.model.dtype)
            yield found._replace(ok=True, note=not found.ok)  # stages may run on another machine
        tokenizer = None if folder is None else _tokenizer(config, folder)
        if tokenizer is not None:
            yield Finding("tokenizer", True, f"{len(tokenizer)} tokens, ends with {tokenizer.eos_token}")
    except UserError as error:
        yield Finding("model", False, str(error))
        folder = tokenizer = None
    except ImportError as error:
        yield _not_looked_at("model", error)
        folder = tokenizer = None
    parts: dict[str, Part] = {}
    for key, source in inputs.sources(config).items():
        try:
            parts[key] = _read(config, key, source, tokenizer)
            yield _of_part(config, key, parts[key], folder)
        except UserError as error:
            yield Finding(key, False, str(error))
        except ImportError as error:
            yield _not_looked_at(key, error)
        except FileNotFoundError as error:
            yield Finding(key, True, f"{error} is not in the Hub's cache yet, so it was not looked at", note=True)
    yield from _rewards(config, parts, folder, tokenizer)


def _not_looked_at(what: str, error: ImportError) -> Finding:
    return Finding(what, True, f"not looked at, since the stages' environment is not here ({error})", note=True)


def _functions(config: Config) -> Iterator[Finding]:
    """Functions that the configuration names and that are not there, by their files' text."""
    sections = {section for stage in STAGES.values() for section in stage.decides}
    for name in provenance.functions(config, sections - {"rewards", "model"}):  # those are called
        try:
            import_string.check(name)
        except UserError as error:
            yield Finding("function", False, str(error))


def _model(config: Config, scratch: Path) -> Path | None:
    """The model's folder, once it is looked at; None where it is still to be fetched."""
    folder = inputs.model_folder(config)
    if config.model.build is not None:
        folder = scratch / "model"
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # what libraries say to themselves
            building.build(config.model, config.seed, config.data_dir, folder)
    if folder is not None:
        inputs.check_model(config, folder)
    return folder


def _of_model(config: Config, folder: Path | None) -> Finding:
    name = config.model.name_or_path or f"made by {config.model.build}"
    if folder is None:
        said = f"{name} is not in the Hub's cache yet, so neither it nor its tokenizer was looked at"
        return Finding("model", True, said, note=True)
    facts = read_json(folder / "config.json")
    said = (
        f"{name}: {facts.get('model_type')}, context {model_dims.context(facts) or 'not known'}, {config.model.dtype}"
    )
    return Finding("model", True, said)


def _tokenizer(config: Config, folder: Path) -> PreTrainedTokenizerBase:
    from rloo_pipeline.artifacts import policy

    return policy.load_tokenizer(folder, config.model.trust_remote_code)


def _read(config: Config, key: str, source: Source, tokenizer: PreTrainedTokenizerBase | None) -> Part:
    """A dataset's rows and its first prompts.

    Raises:
        UserError: it cannot be read, a column is missing, or a row is no prompt.
        FileNotFoundError: it is on the Hub, and not fetched yet.
    """
    place = inputs.data_place(config, key, source)
    if place is None:
        raise FileNotFoundError(source.name)
    rows = read_rows(source, place)
    inputs.check_source_columns(config, key, list(rows[0]), place)
    part = Part(rows, [], [])
    for number, row in enumerate(islice(rows, TEMPLATED)):
        where = f"{place}, row {number}"
        part.prompts.append(prompt_of(row, config.dataset, where))
        if tokenizer is not None:
            part.lengths.append(len(encode(part.prompts[-1], config.dataset, tokenizer, where)))
        if key == inputs.DEMONSTRATIONS and config.warmstart.sft is not None:
            completion_text(row, config.warmstart.sft.completion_column, where)
    return part


def _of_part(config: Config, key: str, part: Part, folder: Path | None) -> Finding:
    """What there is to say of a dataset.

    Raises:
        UserError: no prompt is short enough, or the longest one and a completion are more than the model's context.
    """
    said = f"{len(part.rows):,} rows of {', '.join(part.rows[0])}"
    if not part.lengths or folder is None or key == inputs.DEMONSTRATIONS:
        return Finding(key, True, said)
    most = config.dataset.max_prompt_length
    kept = [length for length in part.lengths if length <= most]
    if not kept:
        raise UserError(
            f"{key}: of the first {len(part.lengths):,} prompts none is within dataset.max_prompt_length ({most}), the "
            f"shortest one has {min(part.lengths)} tokens; raise it"
        )
    inputs.check_context(config, read_json(folder / "config.json"), max(kept), key)
    said += f"; prompts of {min(kept)} to {max(kept)} tokens"
    if len(kept) < len(part.lengths):
        said += f", {len(part.lengths) - len(kept):,} longer ones will be left out"
    if len(part.lengths) < len(part.rows):
        said += f" (of the first {len(part.lengths):,})"
    return Finding(key, True, said)


def _rewards(
    config: Config, parts: Mapping[str, Part], folder: Path | None, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[Finding]:
    """Each reward function on some rows of the training data, and on as many of the held-out."""
    keys = [key for key in ("dataset.train", "dataset.eval") if key in parts]
    tried = {key: _tried(config, parts[key], tokenizer) for key in keys}
    for reward in config.rewards:
        if reward.gpus and not devices.has_gpu():
            yield _uncalled(reward, "it needs a GPU, and there is none here")
        elif not tried:
            yield _uncalled(reward, "there are no rows to call it with")
        for key in tried if not reward.gpus or devices.has_gpu() else ():
            found = _of_reward(reward, key, tried[key], folder)
            yield found
            if not found.ok:
                break


def _uncalled(reward: Reward, why: str) -> Finding:
    """What its file's text tells of a function."""
    what = f"reward {reward.column}"
    try:
        import_string.check(reward.function)
    except UserError as error:
        return Finding(what, False, str(error))
    return Finding(what, True, f"{reward.function} is there; it was not called, since {why}", note=True)


class Tried(NamedTuple):
    """What reward functions are called with."""

    batch: RewardBatch
    of_data: bool
    """Whether every other completion is the data's own solution."""


def _tried(config: Config, part: Part, tokenizer: PreTrainedTokenizerBase | None) -> Tried:
    from rloo_pipeline.scoring.reward_call import OWN_ARGUMENTS
    from rloo_pipeline.scoring.score_batch import RewardBatch

    rows = [row for row in part.rows[:PROMPTS] for _ in range(SAMPLES)]
    prompts = [prompt for prompt in part.prompts[:PROMPTS] for _ in range(SAMPLES)]
    names = ["completion", "solution", "answer"]
    if config.warmstart.sft is not None:
        names.insert(0, config.warmstart.sft.completion_column)
    own = next((name for name in names if isinstance(rows[0].get(name), str)), None)
    texts = [str(row[own]) if own and not place % SAMPLES else ANYTHING for place, row in enumerate(rows)]
    completions: list[Any] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    # without a tokenizer as many ids as there are words
    ids = [[*range(len(text.split()))] for text in texts]
    if tokenizer is not None:
        ids = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
    taken = {*OWN_ARGUMENTS, "prompt", "prompt_ids"}
    columns = {name: [row.get(name) for row in rows] for name in rows[0] if name not in taken}
    return Tried(
        RewardBatch(prompts, completions, ids, columns | {"finish_reason": ["stop"] * len(rows)}), own is not None
    )


def _of_reward(reward: Reward, key: str, tried: Tried, folder: Path | None) -> Finding:
    """What a function made of some rows."""
    from rloo_pipeline.scoring.dispatch import WorkerPools
    from rloo_pipeline.scoring.score_batch import score_with

    what = f"reward {reward.column}"
    facts = {} if folder is None else {"tokenizer_path": str(folder)}
    samples = [SAMPLES] * (len(tried.batch.prompts) // SAMPLES)
    try:
        with WorkerPools([reward], reward.threads) as pools:
            (scored,) = score_with(pools, tried.batch, samples, facts)
    except UserError as error:
        return Finding(what, False, f"on rows of {key}: {error}")
    if failed := next(filter(None, [*scored.errors, *scored.notes]), None):
        return Finding(what, True, f"on rows of {key}: {failed}, and passes (see its on_error, on_timeout)", note=True)
    if set(scored.scores) == {None}:
        return Finding(what, True, f"on rows of {key}: None for all; does it find the columns it needs?", note=True)
    values = ["None" if score is None else f"{score:.4g}" for score in scored.scores]
    said = [f"'{ANYTHING}' {', '.join(values[1::SAMPLES])}"]
    if tried.of_data:
        said.insert(0, f"the data's own solutions {', '.join(values[::SAMPLES])}")
    return Finding(what, True, f"on rows of {key}: {'; '.join(said)}")
