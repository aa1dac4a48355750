"""Unreadable data raises one sentence with file, line and column; readable data is unchanged."""

import datetime
import decimal
import enum
import gzip
import io
import json
import os
import zipfile
from csv import field_size_limit
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset as HubDataset
from pyarrow.csv import write_csv

from rloo_pipeline import import_string
from rloo_pipeline.artifacts.prompt_set import as_dataset, rows_of
from rloo_pipeline.config import Dataset, Source
from rloo_pipeline.data.prompting import check_columns, check_names, prompt_of
from rloo_pipeline.data.rows import read_rows
from rloo_pipeline.errors import UserError

ROWS = [{"question": f"What is {n}?", "answer": str(n)} for n in range(60)]


def lines(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def without_rows() -> bytes:
    """A Parquet file that has a column and no row."""
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), file := io.BytesIO())
    return file.getvalue()


BROKEN = {
    "not UTF-8": (
        "a.jsonl",
        lines(ROWS).replace("is 40?", "is é?").encode("latin-1"),
        "line 41: not UTF-8 (byte 0xe9)",
    ),
    "not UTF-8 after a byte order mark": ("a.jsonl", b'\xef\xbb\xbf{"a": "\xe9"}\n', "line 1: not UTF-8 (byte 0xe9)"),
    "a number among texts": (
        "a.jsonl",
        lines([*ROWS[:20], {"question": "?", "answer": 5}, *ROWS[20:]]),
        "line 21: column 'answer' holds a number (5) and text in line 1",
    ),
    "a broken line": ("a.jsonl", lines(ROWS[:39]) + '{"question": \n' + lines(ROWS[40:]), "line 40: not JSON"),
    "a cut file": ("a.jsonl", lines(ROWS)[:-9], "line 60: not JSON"),
    "no file content": ("a.jsonl", "", "is empty"),
    "blank lines alone": ("a.jsonl", "\n\n", "is empty"),
    "lines that are lists": ("a.jsonl", "[1]\n", "line 1: holds a list, not an object with columns"),
    "kinds inside of messages": (
        "a.jsonl",
        lines([{"prompt": [{"content": "a"}]}, {"prompt": [{"content": 1}]}]),
        "line 2: column 'prompt[].content' holds a number (1) and text in line 1",
    ),
    "a cut list": (
        "a.json",
        json.dumps(ROWS, indent=1)[:-30],
        "line 239: not JSON: Unterminated string starting at character",
    ),
    "a row of a list": (
        "a.json",
        json.dumps([*ROWS[:3], {"answer": True}]),
        "row 3: column 'answer' holds true or false",
    ),
    "a key twice": (
        "a.jsonl",
        '{"a": "1"}\n{"a": "1", "a": "2"}',
        "line 2: an object has the key 'a' twice; remove one",
    ),
    "a key twice in a list": ("a.json", '[{"a": [{"b": 1,\n"b": 2}]}]', "a.json: an object has the key 'b' twice"),
    "a key twice in a folder": (
        "folder/a.jsonl",
        '{"a": 1}\n{"a": 1, "a": 1}',
        "a.jsonl, line 2: an object has the key",
    ),
    "an empty list": ("a.json", "[]", "is empty"),
    "no Parquet": ("a.parquet", "hello", "truncated or damaged"),
    "an empty Parquet": ("a.parquet", "", "is empty"),
    "a Parquet without rows": ("a.parquet", without_rows(), "is empty"),
    "text": ("a.txt", "a,b\n", "dataset files can be .jsonl, .json, .csv, .tsv, .parquet"),
    "CSV without rows": ("a.csv", "a,b\n", "is empty"),
    "CSV with more fields": ("a.csv", 'a,b\n"1,\n2",3\n1,2,3\n', "line 4: 3 fields for 2 columns; put quotes around"),
    "CSV with a quote": (
        "a.csv",
        '\na,b\n\n"1,2\n3,4\n',
        "line 4: not .csv (unexpected end of data); close the quotes",
    ),
    "CSV with fewer fields": ("a.csv", "a,b\n \n", "line 2: 1 field for 2 columns"),
    "CSV with a name twice": ("a.csv", "a,a\n1,2\n", "line 1: two columns have the name 'a'"),
    "CSV in a folder": ("folder/a.csv", "a,b\n1,2\n1,2,3\n", "folder/a.csv, line 3: 3 fields"),
    "CSV in a folder with delimiters at the ends of lines": (
        "folder/a.csv",
        "a,b\n1,2,\n3,4,\n",
        "folder/a.csv, line 2: 3 fields for 2 columns",
    ),
    "CSV in a folder with fewer fields": (
        "folder/a.csv",
        "a,b\n1,2\n3\n",
        "folder/a.csv, line 3: 1 field for 2 columns",
    ),
    "a folder with a number among texts": (
        "folder/a.jsonl",
        lines([{"a": "1"}, {"a": 1}]),
        "a.jsonl, line 2: column 'a'",
    ),
    "a folder with half of a character": (
        "folder/a.jsonl",
        lines([*ROWS[:3], {"answer": "half \ud83d"}]),
        "a.jsonl, line 4: column 'answer' has half of a character (\\ud83d, a lone surrogate) at position 5",
    ),
    "half of a character in a key": ("a.jsonl", '{"a": {"\\ud800": 1}}', "line 1: column 'a' has half of a character"),
    "brackets": (
        "a.jsonl",
        f'{{"a": {"[" * 100_000}{"]" * 100_000}}}',
        "line 1: lists or objects are nested too deeply",
    ),
    "levels that later readers lack": ("a.jsonl", f'{{"a": {"[" * 200}{"]" * 200}}}', "is nested more than 100 levels"),
    "digits": ("a.jsonl", f'{{"a": {"1" * 100_000}}}', "line 1: a number has more than 4,300 digits; write it as text"),
    "bits": ("a.jsonl", f'{{"a": {"1" * 4_000}}}', "line 1: column 'a' has a number of 13,285 bits; write it as text"),
    "an integer that fractions round": (
        "a.jsonl",
        '{"a": 0.5}\n{"a": 9007199254740993}',
        "line 2: column 'a' holds the integer 9007199254740993, which would be rounded, since the column also has",
    ),
    "a cut archive": ("folder/a.jsonl.gz", gzip.compress(lines(ROWS).encode())[:-20], "Compressed file ended before"),
    "an unknown split": ("folder/test.jsonl", lines(ROWS), 'Unknown split "train"'),
    "an empty folder": ("folder/.x", "", "folder: cannot be read as a dataset"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_error_with_its_place(name, tmp_path) -> None:
    file, content, message = BROKEN[name]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    place = path.parent if "/" in file else path
    with pytest.raises(UserError) as error:
        read_rows(Source(name="x") if place.is_dir() else Source(path="x"), str(place))
    assert str(error.value).startswith(str(place))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


TEXTS = ["007", "NA", "None", "nan", "1.0", "true", "2024-01-01", "null", " ", ""]
DECLARED = """---
dataset_info:
  features:
  - {name: n, dtype: int64}
  - {name: answer, dtype: string}
---
"""


def test_a_table_of_short_fields_leaves_other_readers_of_the_process_room_for_long_ones(tmp_path) -> None:
    file, before = tmp_path / "a.csv", field_size_limit()
    for text in ("1", "1" * 2 * before):
        file.write_text(f"a,b\n{text},2\n")
        assert read_rows(Source(path=str(file)), str(file)) == [{"a": text, "b": "2"}]
        assert field_size_limit(before) == max(before, file.stat().st_size)


def test_texts_that_look_like_other_values_stay_texts(tmp_path) -> None:
    rows = [{"n": number, "answer": text} for number, text in enumerate(TEXTS)]
    csv = "n,answer\n" + "".join(f"{row['n']},{row['answer']}\n" for row in rows)
    of_csv = [row | {"n": str(row["n"])} for row in rows]
    files = {
        "a.jsonl": (lines(rows), rows),
        "a.json": ("\ufeff" + json.dumps(rows), rows),
        "json/train.jsonl": (lines(rows), rows),
        "packed/train.json.gz": (gzip.compress(lines(rows).encode()), rows),
        "a.csv": ("\ufeff," + csv.replace("\n", "\r\n0,")[:-2], of_csv),
        "a.tsv": (csv.replace(",", "\t"), of_csv),
        "csv/train.csv": (csv, of_csv),
        "tsv/train.tsv": (csv.replace(",", "\t"), of_csv),
        "declared/README.md": (DECLARED, None),
        "declared/train.csv": (csv, rows),
        "described/README.md": (DECLARED, None),
        "described/train.jsonl": (lines(rows), rows),
    }
    for name, (content, _) in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, (_, expected) in files.items():
        place = tmp_path / name if "/" not in name else (tmp_path / name).parent
        if expected is not None:
            source = Source(path="x") if place.is_file() else Source(name="x")
            assert read_rows(source, str(place)) == expected, name


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_all_files_of_an_archive_are_read(suffix, tmp_path) -> None:
    rows = [{"question": f"{n}?", "answer": f"00{n}"} for n in range(6)]
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        for name, part in (("a", rows[:3]), ("b", rows[3:])):
            table = "question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in part)
            archive.writestr(f"{name}.{suffix}", lines(part) if suffix == "jsonl" else table)
    assert read_rows(Source(path=str(tmp_path)), str(tmp_path)) == rows


@pytest.mark.parametrize("name", ["rows.parquet", "train.csv", "train.zip"])
def test_a_file_that_was_replaced_is_read_anew(name, tmp_path) -> None:
    """`datasets` keeps converted files by time, and what it extracts from archives by path."""
    for rows in (ROWS[:2], ROWS[2:4]):
        table = pa.Table.from_pylist(rows)
        if name.endswith("parquet"):
            pq.write_table(table, tmp_path / name)
        elif name.endswith("csv"):
            write_csv(table, tmp_path / name)
        else:
            with zipfile.ZipFile(tmp_path / name, "w") as archive:
                archive.writestr("a.jsonl", lines(rows))
        os.utime(tmp_path / name, (1e9, 1e9))
        sources = [(Source(name="x"), tmp_path), *([(Source(path="x"), tmp_path / name)] if name[0] == "r" else [])]
        assert [read_rows(source, str(place)) for source, place in sources] == [rows] * len(sources)


def test_a_folder_with_rows_in_files_of_several_formats_is_refused(tmp_path) -> None:
    """`datasets` reads those of one format."""
    for name in ("a.csv", "b.csv"):
        write_csv(pa.Table.from_pylist(ROWS[:2]), tmp_path / name)
    (tmp_path / "facts.json").write_text("{}")
    (tmp_path / "README.md").write_text("Sums.")
    assert read_rows(Source(name="x"), str(tmp_path)) == ROWS[:2] * 2
    (tmp_path / "c.jsonl").write_text(lines(ROWS[2:4]))
    with pytest.raises(UserError, match=r"c\.jsonl: would not be read, since .*a\.csv has another format"):
        read_rows(Source(name="x"), str(tmp_path))
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: a\n  data_files: a.csv\n---\n")
    assert read_rows(Source(name="x"), str(tmp_path)) == ROWS[:2]


def test_parts_may_be_numbered_from_1(tmp_path) -> None:
    for part in (1, 2):
        (tmp_path / f"train-0000{part}-of-00002.jsonl").write_text(lines(ROWS[part : part + 1]))
    assert read_rows(Source(name="x"), str(tmp_path)) == ROWS[1:3]


def test_a_dataset_of_which_a_part_was_not_fetched_is_refused(tmp_path) -> None:
    for part in (0, 2):
        (tmp_path / f"train-0000{part}-of-00003.jsonl").write_text(lines(ROWS[part : part + 1]))
    with pytest.raises(UserError, match=r"train-00001-of-00003\.jsonl: missing, though other files of the 3 are"):
        read_rows(Source(name="x"), str(tmp_path))
    (tmp_path / "train-00001-of-00003.jsonl").write_text(lines(ROWS[1:2]))
    assert read_rows(Source(name="x"), str(tmp_path)) == ROWS[:3]


def test_splits_of_a_folder_are_those_of_datasets(tmp_path) -> None:
    for name, rows in (("train", ROWS[:6]), ("test", ROWS[6:9])):
        (tmp_path / f"{name}.jsonl").write_text(lines(rows))
    for split, expected in (("all", ROWS[:9]), ("train[:50%]+test[-1:]", [*ROWS[:3], ROWS[8]]), ("test", ROWS[6:9])):
        assert read_rows(Source(name="x", split=split), str(tmp_path)) == expected


def test_splits_that_are_read_together_have_the_columns_of_all(tmp_path) -> None:
    (tmp_path / "train.jsonl").write_text(lines([{"question": "1?"}]))
    (tmp_path / "test.jsonl").write_text(lines([{"question": "2?", "answer": "2"}]))
    together = [{"question": "1?", "answer": None}, {"question": "2?", "answer": "2"}]
    assert read_rows(Source(name="x", split="all"), str(tmp_path)) == together
    assert read_rows(Source(name="x", split="train"), str(tmp_path)) == [{"question": "1?"}]
    (tmp_path / "test.jsonl").write_text(lines([{"question": 2}]))
    with pytest.raises(
        UserError, match=r"test\.jsonl, line 1: column 'question' holds a number \(2\) and text in line 1"
    ):
        read_rows(Source(name="x", split="train+test"), str(tmp_path))


class Colour(enum.IntEnum):
    RED = 1


VALUES = {
    "NumPy's integers": (np.int64(3), 3),
    "NumPy's floats": (np.float32(0.5), 0.5),
    "NumPy's texts": (np.str_("a"), "a"),
    "arrays": (np.arange(3), [0, 1, 2]),
    "tuples": ((1, 2), [1, 2]),
    "enumerations of numbers": (Colour.RED, 1),
    "integers of 64 bits": (2**63, 2**63),
    "large integers": ([-(2**70)], [-(2**70)]),
    "large integers beside small ones": ([1, 2**64 - 1], [1, 2**64 - 1]),
    "many levels": ([[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]], None),
    "dates": (datetime.date(2024, 1, 2), datetime.date(2024, 1, 2)),
    "decimals": (decimal.Decimal("1.50"), decimal.Decimal("1.50")),
    "bytes": (b"\xff", b"\xff"),
    "no bytes": ("a\0b", "a\0b"),
    "infinity": (float("inf"), float("inf")),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_a_generator_comes_back_as_pythons_own(name, monkeypatch) -> None:
    given, expected = VALUES[name]
    rows = read_rows(generated(monkeypatch, [given, None]), "")
    stored = rows_of(as_dataset(rows).data.table)
    assert stored == rows == [{"extra": given if expected is None else expected}, {"extra": None}]
    assert type(stored[0]["extra"]) is type(given if expected is None else expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{1}], "row 0: column 'extra' holds a set"),
        ([None, Path("/x")], "row 1: column 'extra' holds a PosixPath"),
        ([{"a": [1j]}], r"row 0: column 'extra.a\[\]' holds a complex"),
        ([{1: "a"}], "row 0: column 'extra' has the key 1, which is not a string"),
        ([1, "1"], r"row 1: column 'extra' holds text \('1'\) and a number in row 0"),
        ([[1, "a"]], r"row 0: column 'extra\[\]' holds text"),
        ([datetime.date(2024, 1, 2), datetime.datetime(2024, 1, 2)], "row 1: column 'extra' holds a time"),
        (["\ud800"], r"row 0: column 'extra' has half of a character \(\\ud800"),
        ([10**5000], "row 0: column 'extra' has a number of 16,610 bits"),
    ],
)
def test_a_value_of_a_generator_that_is_not_plain_is_an_error_with_its_place(values, message, monkeypatch) -> None:
    with pytest.raises(UserError, match=rf"^the generator made_rows:rows, {message}"):
        read_rows(generated(monkeypatch, values), "")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({0: "a", "question": "b"}, "the row has the key 0, which is not a string; put it into quotes"),
        ({"\ud800": "a"}, r"the row has half of a character \(\\ud800, a lone surrogate\) at position 0"),
    ],
)
def test_a_column_whose_name_is_not_a_text_is_an_error_with_its_place(row, message, monkeypatch) -> None:
    """As of pandas' `to_dict` for a table without a header."""
    monkeypatch.setattr(import_string, "load", lambda _: lambda: [row])
    with pytest.raises(UserError, match=rf"^the generator made_rows:rows, row 0: {message}"):
        read_rows(Source(generator="made_rows:rows"), "")


def generated(monkeypatch, values: list) -> Source:
    """The source of a generator that gives these values as a column."""
    monkeypatch.setattr(import_string, "load", lambda _: lambda: [{"extra": value} for value in values])
    return Source(generator="made_rows:rows")


def test_rows_have_all_columns_and_max_rows_limits_reading(tmp_path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\r\n\r\n{"a": 2.5, "b": "\u2028"}\nbroken')
    rows = read_rows(Source(path="x", max_rows=2), str(file))
    assert rows == [{"a": 1.0, "b": None}, {"a": 2.5, "b": "\u2028"}]
    assert all(type(row["a"]) is float for row in rows)


def test_rows_of_arrow_after_the_first_max_rows_are_never_objects(tmp_path, monkeypatch) -> None:
    """There may be more than memory holds."""
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), file)
    made, to_list = list[int](), HubDataset.to_list
    monkeypatch.setattr(HubDataset, "to_list", lambda self: made.append(len(self)) or to_list(self))
    for source in (Source(path="x", max_rows=2), Source(name="x", max_rows=2)):
        assert read_rows(source, str(file if source.path else tmp_path)) == ROWS[:2]
    assert read_rows(Source(path="x", max_rows=99), str(file)) == ROWS
    assert made == [2, 2, 60]


def test_calls_of_tools_have_their_own_arguments_alone(tmp_path) -> None:
    """Arrow gives every message and every call the keys of all others, as null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def call(**arguments: object) -> dict:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "tool", "arguments": arguments}}]}

    messages = [call(city="Rome"), {"role": "tool", "name": "tool", "content": "1"}, call(days=[1, None])]
    rows = [{"completion": messages, "other": [{"a": None, "b": 1}], "guests": [{"role": "cook", "age": None}]}]
    filled = pa.Table.from_pylist(rows)
    pq.write_table(filled, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(filled.to_pylist()[0]))
    (tmp_path / "data.py").write_text(f"def made():\n    return {filled.to_pylist()}\n")
    for file in ("a.parquet", "a.jsonl"):
        assert read_rows(Source(path=file), str(tmp_path / file)) == rows
    assert read_rows(Source(generator=f"{tmp_path / 'data.py'}:made"), "") == rows, "a generator may take a dataset's"


def test_a_damaged_parquet_file_is_named(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), file)
    assert read_rows(Source(path="x"), str(file)) == ROWS
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(UserError, match=r"a\.parquet: truncated or damaged"):
        read_rows(Source(path="x"), str(file))


def test_a_generator_that_fails_names_the_users_line(tmp_path) -> None:
    file = tmp_path / "data.py"
    file.write_text(
        "def made(count):\n    rows = ['a'] * count\n    assert count >= 0, 'two\\nlines'\n"
        "    return rows if count else rows[0]\ndef short():\n    return [next(iter(())) for _ in range(3)]\n"
    )
    for options, message in (
        ({"size": 1}, "options of the generator .* do not fit it"),
        ({"count": 0}, r"raised IndexError: list index out of range \(data.py, line 4\)"),
        ({"count": -1}, r"raised AssertionError: two lines \(data.py, line 3\)$"),
        ({"count": 1}, "yielded a str as row 0; it must yield dicts"),
    ):
        with pytest.raises(UserError, match=message):
            read_rows(Source(generator=f"{file}:made", options=options), "")
    with pytest.raises(UserError, match=r"raised StopIteration \(data.py, line 6\)$"):
        read_rows(Source(generator=f"{file}:short"), "")


def test_the_rows_of_a_generator_have_the_columns_of_all_rows(tmp_path) -> None:
    file = tmp_path / "data.py"
    file.write_text("def made():\n    yield {'a': 1}\n    yield {'b': 2, 'a': 3}\n")
    assert read_rows(Source(generator=f"{file}:made"), "") == [{"a": 1, "b": None}, {"a": 3, "b": 2}]


def dataset(**changes) -> Dataset:
    return Dataset(train=Source(path="a"), eval=Source(path="b"), **changes)


@pytest.mark.parametrize(
    ("changes", "row", "message"),
    [
        (
            {"user_prompt": "{qestion}"},
            ROWS[0],
            r"no column 'qestion' \(dataset.user_prompt names it\); did you mean 'qu",
        ),
        ({"user_prompt": "{question}"}, {"question": None}, "column 'question' is null"),
        ({"user_prompt": "{task[question]}"}, {"task": {"question": None}}, r"column 'task\[question\]' is null, but"),
        ({"user_prompt": "{number}"}, {"number": float("nan")}, "column 'number' is null, but"),
        ({"user_prompt": "{question.x}"}, ROWS[0], "dataset.user_prompt does not fit the row"),
        ({"user_prompt": "{question:d}"}, ROWS[0], "dataset.user_prompt does not fit the row"),
        ({}, ROWS[0], r"no column 'prompt' \(dataset.prompt_column\); there are question, answer"),
        ({}, {"prompt": 3}, "column 'prompt' holds 3; a prompt must be a string, or a list of messages"),
        ({}, {"prompt": [{"content": "a"}]}, "a list of messages with role"),
        ({}, {"prompt": []}, "a prompt must be a string"),
        ({}, {"prompt": [{"role": "user", "content": None}]}, "row 3: a message of the role 'user' has no content"),
        (
            {},
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "a message has a part of the type 'image', ",
        ),
        ({}, {"prompt": [{"role": "user", "content": [{"image": "a.png"}]}]}, "'image', .*dataset.image_column"),
        (
            {"image_column": "image"},
            {"prompt": [{"role": "user", "content": [{"type": "video"}]}], "image": None},
            "a part of the type 'video', which the model would not see; write it as text, or drop the row",
        ),
    ],
)
def test_a_row_without_a_valid_prompt_is_an_error(changes, row, message) -> None:
    with pytest.raises(UserError, match=message):
        prompt_of(row, dataset(**changes), "train.jsonl, row 3")


def test_images_of_messages_need_a_column_and_texts_in_parts_do_not() -> None:
    seen = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1"}]}]
    assert prompt_of({"prompt": seen, "image": None}, dataset(image_column="image"), "x") == seen
    texts = [{"type": "thinking", "thinking": "2"}, seen[0]["content"][1]]
    assert prompt_of({"prompt": [{**seen[0], "content": texts}]}, dataset(), "x")


def test_a_message_of_a_prompt_with_calls_may_lack_a_text() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    user, tool = {"role": "user", "content": "1"}, {"role": "tool", "content": "2"}
    assert prompt_of({"prompt": [user, call, tool]}, dataset(), "x") == [user, {**call, "content": ""}, tool]


def test_the_system_prompt_of_the_run_stands_before_messages_without_one() -> None:
    told, user = ({"role": role, "content": text} for role, text in (("system", "Add."), ("user", "1")))
    for prompt in ("1", [user], [told, user]):
        assert prompt_of({"prompt": prompt}, dataset(system_prompt="Add."), "x") == [told, user]
    assert prompt_of({"prompt": [told, user]}, dataset(system_prompt="No."), "x") == [told, user]


def test_reserved_column_names_are_refused() -> None:
    check_columns(["prompt", "seconds"], dataset(), "x")
    with pytest.raises(UserError, match="column 'seconds' is a name of the run's own tables; rename it"):
        check_names(["prompt", "seconds"], dataset(), "x")
    check_names(["prompt", "completion"], dataset(), "x")
