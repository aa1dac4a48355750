"""Data detection for `rloo init`: finds training and held-out rows, and the columns with prompt and answer."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.config import Source
from rloo_pipeline.data.kinds import are_messages
from rloo_pipeline.data.prompting import check_column
from rloo_pipeline.data.rows import FORMATS, Row, check_file, read_rows
from rloo_pipeline.errors import UserError, did_you_mean

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "input", "messages", "conversations")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target", "label", "output")
"""Usual names of these columns, in order of preference."""
SPLITS = ("data/train.jsonl", "data/eval.jsonl")
"""Files of a project with training and held-out rows."""
ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of roles, and those of chat templates."""
HELD_OUT_NAMES = ("test", "eval", "validation", "valid", "dev")
HELD_OUT_SHARE, MOST_HELD_OUT = 0.2, 500
"""Share of the prompts of a single file that is held out, and the maximum number of rows."""
EXAMPLES = 3


class ProjectData(NamedTuple):
    """The data of a project."""

    name: str
    """The name that the user gave."""
    train: dict[str, str]
    """Source of the training rows, as a section of the configuration."""
    eval: dict[str, str]
    """Source of the held-out rows."""
    columns: tuple[str, ...]
    prompt: str
    """Column with the prompt."""
    answer: str | None = None
    """Column with the right answer; None if there is none."""
    is_conversation: bool = False
    """True if the prompts are lists of messages."""
    rows: Mapping[str, Sequence[Row]] = {}
    """Rows of `train` and `eval`; empty if they are not on this machine."""
    splits: Mapping[str, Sequence[Row]] = {}
    """Files to write and their rows, if a single file is split."""

    @property
    def examples(self) -> Sequence[Row]:
        """The first training rows."""
        return self.rows.get("train", ())[:EXAMPLES]


def project_data(name: str, held_out: str | None, prompt: str | None, answer: str | None, folder: Path) -> ProjectData:
    """Finds a project's training and held-out rows.

    Args:
        name: a file, a folder with train and test files, or an id on the Hub.
        held_out: a file with held-out rows.
        prompt: column with the prompt; None to guess it.
        answer: column with the right answer; None to guess it.
        folder: the project's folder, to which paths in the configuration are relative.

    Raises:
        UserError: the data or columns do not exist, or there are too few rows.
    """
    path = Path(name).expanduser()
    if not path.exists() and path.suffix not in FORMATS and HUB_ID.fullmatch(name):
        return _data_on_hub(name, prompt, answer)
    files = _files(name, path, held_out)
    sets: list[Sequence[Row]] = [read_rows(Source(path=str(file)), str(file)) for file in files]
    columns = tuple(sets[0][0])
    column = _column("--prompt", prompt, PROMPT_COLUMNS, columns, name)
    if column is None:
        raise UserError(
            f"{name}: none of its columns ({', '.join(columns)}) has a usual name for prompts: name it with "
            "--prompt COLUMN"
        )
    if answer == column:
        raise UserError(f"--answer {answer}: the prompt is in this column; name another one")
    for file, rows in zip(files, sets, strict=True):
        check_column(column, rows[0], "--prompt", str(file))
    own = {name.lower() for name in columns}
    usual = sorted(ANSWER_COLUMNS, key=lambda name: name not in own)  # the last message answers if no column does
    made, column = _with_prompts(sets, column, is_guess=prompt is None)
    columns = tuple(dict.fromkeys(name for row in made[0] for name in row))
    splits = _split(made[0], files[0], column) if len(files) == 1 else {}
    if len(files) > 1 and made != sets:
        splits = dict(zip(SPLITS, made, strict=True))
    sets = list(splits.values()) or made
    paths = list(splits) or [place_in(folder, file) for file in files]
    return ProjectData(
        name=name,
        train={"path": paths[0]},
        eval={"path": paths[1]},
        columns=columns,
        prompt=column,
        answer=_column("--answer", answer, usual, [other for other in columns if other != column], name),
        is_conversation=isinstance(sets[0][0][column], list),
        rows=dict(zip(("train", "eval"), sets, strict=True)),
        splits=splits,
    )


def _data_on_hub(name: str, prompt: str | None, answer: str | None) -> ProjectData:
    """Data of a Hub dataset with the splits train and test, which is not read here.

    Raises:
        UserError: the column with the prompt is not named.
    """
    if prompt is None:
        suggestion = did_you_mean(Path(name).name, (file.name for file in Path(name).parent.glob("*")))
        raise UserError(
            f"--data {name}: no such file or folder; if it is an id on the Hub, name its columns with --prompt and "
            f"--answer{suggestion}"
        )
    named = tuple(column for column in (prompt, answer) if column)
    train, test = ({"name": name, "split": split} for split in ("train", "test"))
    return ProjectData(name, train, test, named, prompt, answer)


def place_in(folder: Path, path: Path) -> str:
    """A path as a project's configuration names it: relative if it is inside the project, otherwise absolute."""
    real, inside = path.resolve(), folder.resolve()
    return str(real.relative_to(inside)) if real.is_relative_to(inside) else str(real)


def _files(name: str, path: Path, held_out: str | None) -> list[Path]:
    """The file of training rows and, unless that one is to be split, the file of held-out rows.

    Raises:
        UserError: the file does not exist, is empty, or has another format.
    """
    if path.is_dir():
        by_stem = {file.stem: file for file in sorted(path.iterdir()) if file.suffix in FORMATS}
        tests = [by_stem[stem] for stem in HELD_OUT_NAMES if stem in by_stem]
        if "train" not in by_stem or not (tests or held_out):
            if any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
                write = f"datasets.load_from_disk({name!r}).to_json('train.jsonl')"
                raise UserError(f"--data {name}: was written by save_to_disk; write rows with {write}, part by part")
            raise UserError(
                f"--data {name}: no train and test files ({', '.join(FORMATS)}) in this folder; name a file with "
                "--data FILE, and one of held-out rows with --held-out FILE if there is one"
            )
        files = [by_stem["train"], *tests[:1]]
    else:
        files = [path]
    if held_out:
        files[1:] = [Path(held_out)]
    for file in files:
        if not file.is_file():
            names = (other.name for other in file.parent.glob("*") if other.suffix in FORMATS)
            raise UserError(f"{file}: no such file of rows ({', '.join(FORMATS)}){did_you_mean(file.name, names)}")
        check_file(file)
    return files


def _split(rows: Sequence[Row], file: Path, prompt: str) -> dict[str, Sequence[Row]]:
    """Splits rows into files of a project. A fifth of the prompts is held out, drawn at random but always the same,
    with all of their rows.
    """
    if len(rows) < 2:
        raise UserError(f"{file}: one row cannot be split into training and held-out rows; give --held-out FILE")
    places = dict[str, list[int]]()
    for index, row in enumerate(rows):
        places.setdefault(repr(row[prompt]), []).append(index)
    groups = [*places.values()] if len(places) > 1 else [[index] for index in range(len(rows))]
    count = min(MOST_HELD_OUT, max(1, round(len(groups) * HELD_OUT_SHARE)))
    chosen = set[int]()
    for group in random.Random(0).sample(groups, count):
        if not chosen or len(chosen) + len(group) <= MOST_HELD_OUT:
            chosen.update(group)
    train = [row for index, row in enumerate(rows) if index not in chosen]
    return dict(zip(SPLITS, (train, [rows[index] for index in sorted(chosen)]), strict=True))


def _with_prompts(sets: list[Sequence[Row]], column: str, is_guess: bool) -> tuple[list[Sequence[Row]], str]:
    """Rows that have the prompt alone in one column, and the column.

    The last message of a conversation, if it is the assistant's, becomes the column `answer`, and Alpaca's columns
    `instruction` and `input` together become `prompt`, if they are texts. All other rows are returned as they are.
    """
    if is_guess and column == "instruction" and any(row.get("input") for rows in sets for row in rows):
        values = (row.get(name) for rows in sets for row in rows for name in (column, "input"))
        if all(isinstance(value, str | None) for value in values):
            return [
                [row | {"prompt": _joined(row[column], row.get("input"))} for row in rows] for rows in sets
            ], "prompt"
    return [[_without_answer(row, column) for row in rows] for rows in sets], column


def _joined(*texts: str | None) -> str:
    return "\n\n".join(filter(None, texts))


def _without_answer(row: Row, column: str) -> Row:
    """A row without the assistant's last message in a conversation, if others precede it, which becomes the column
    `answer`.
    """
    messages = row[column] if isinstance(row[column], list) else []
    if are_messages(messages, "from"):  # ShareGPT
        messages = [{"role": ROLES.get(one["from"], one["from"]), "content": one.get("value")} for one in messages]
    elif not are_messages(messages):
        return row
    if len(messages) > 1 and messages[-1]["role"] == "assistant":
        *messages, last = messages
        row = {"answer": last.get("content")} | row
    return row | {column: messages}


def dump_rows(rows: Sequence[Row], file: str) -> str:
    """Formats rows as JSON Lines.

    Raises:
        UserError: JSON cannot represent a value, such as a date from Parquet.
    """
    try:
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except TypeError as error:
        column = next(name for row in rows for name, value in row.items() if not _fits_json(value))
        raise UserError(
            f"{file}: column '{column}': {error}; leave it out of the data, or split the data yourself and give --data "
            "FILE and --held-out FILE"
        ) from None


def _fits_json(value: object) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _column(
    option: str, column_name: str | None, usual: Sequence[str], columns: Sequence[str], name: str
) -> str | None:
    """The column that was named, otherwise the first one with a usual name.

    Raises:
        UserError: the given column does not exist.
    """
    if column_name is not None and column_name not in columns:
        suggestion = did_you_mean(column_name, columns) or f" ({', '.join(columns)})"
        raise UserError(f"{option} {column_name}: {name} has no such column{suggestion}")
    by_lower = {column.lower(): column for column in reversed(columns)} | {column: column for column in columns}
    return column_name or next((by_lower[column] for column in usual if column in by_lower), None)
