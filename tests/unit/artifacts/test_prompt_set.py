"""Rows of prompts come back as they were stored, objects with their own keys; ordinary columns are plain Arrow."""

import datetime
from array import array
from pathlib import Path

import datasets
import pytest
from helpers import write_prompts

from rloo_pipeline.artifacts import prompt_set
from rloo_pipeline.artifacts.prompt_set import PromptSet, as_dataset, packed, rows_of

PLAIN = [
    {"prompt_id": name, "prompt": [{"role": "user", "content": name}], "prompt_ids": [4, 5], "about": about}
    for name, about in [("a", {"level": 1, "tags": ["x"]}), ("b", {"level": 2, "tags": []}), ("c", None)]
]
"""Rows whose objects have the same keys."""


@pytest.mark.parametrize(
    "values",
    [
        [{"city": "Paris"}, {"date": "May 3"}, None],
        [[{"num_words": 3}, {}], [], [{"keyword": "x", "forbidden": None}]],
        [{"of": {"a": 1}}, {"of": {"b": 0.1234567890123456789}}, {"of": None}],
        [{"of": [[{"a": 1}], [{"b": 10**30, "c": "\ud800é"}]]}, {"of": []}, {"of": None}],
    ],
    ids=["objects", "lists", "inner objects", "lists in objects"],
)
def test_objects_keep_their_own_keys(tmp_path: Path, values: list) -> None:
    rows = [row | {"column": value} for row, value in zip(PLAIN, values, strict=True)]
    write_prompts(tmp_path, rows)
    prompts = PromptSet(tmp_path / "train")
    assert prompts.rows([2, 0, 1]) == [rows[2], rows[0], rows[1]]
    assert prompts.by_id(["b", "a"]) == {"a": rows[0], "b": rows[1]}


def test_the_messages_of_a_prompt_keep_their_own_keys(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "user", "content": "again", "name": "Ann"}]
    write_prompts(tmp_path, [PLAIN[0] | {"prompt": messages}, PLAIN[1]])
    prompts = PromptSet(tmp_path / "train")
    assert [row["prompt"] for row in prompts.rows([0, 1])] == [messages, PLAIN[1]["prompt"]]
    assert prompts.texts(["a", "b"]) == ["user: hello\nuser: again", "user: b"]


def test_rows_whose_objects_have_the_same_keys_are_plain_arrow() -> None:
    plain = datasets.Dataset.from_list(PLAIN)
    features = plain.features | {"prompt_ids": datasets.List(datasets.Value("int32"))}
    expected = datasets.Dataset.from_list(PLAIN, features=datasets.Features(features)).data.table
    assert as_dataset(PLAIN).data.table.equals(expected, check_metadata=True)


def test_everyone_reads_json_columns_with_datasets(tmp_path: Path) -> None:
    rows = [{"prompt_id": "a", "expected": {"city": "Paris"}}, {"prompt_id": "b", "expected": {"date": "May 3"}}]
    as_dataset(rows).save_to_disk(str(tmp_path))
    assert datasets.load_from_disk(str(tmp_path)).to_list() == rows


def test_what_json_lacks_is_stored_by_arrow() -> None:
    day = datetime.date(2024, 1, 2)
    stored = rows_of(as_dataset([{"about": {"day": day}}, {"about": {"city": "Paris"}}]).data.table)
    assert stored == [{"about": {"day": day, "city": None}}, {"about": {"day": None, "city": "Paris"}}]


COLUMNS = {
    "text": ["a", "b", None, "d", "é", ""],
    "late": [None, None, None, None, 1.5, None],
    "objects": [{"a": 1}, {"a": 2}, {"a": 3}, None, {"b": 4}, {"b": 5}],
    "one kind": [{"a": [1]}, {"a": []}, {"a": [2, 3]}, None, {"a": None}, {"a": [4]}],
    "large": [1, 2, 3, 4, 10**30, 5],
    "unsigned": [1, 2, 3, 4, 2**63, 5],
    "days": [{"x": datetime.date(2024, 1, 2)}, None, {"y": 1}, None, None, {"x": datetime.date(2024, 1, 3)}],
    "empty": [None] * 6,
    "lists": [[], [], [None], ["x"], [], ["y", "z"]],
    "input_ids": [[1], [2], [3], [2**40], [], [4]],
}


def test_rows_that_become_arrow_a_few_at_a_time_are_the_same_bytes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(prompt_set, "PACKED", 2)
    rows = [
        {"prompt_id": f"p{row}", "prompt_ids": array("i", [row, 5]), **{name: of[row] for name, of in COLUMNS.items()}}
        for row in range(6)
    ]
    as_dataset(rows).save_to_disk(str(tmp_path / "whole"))
    packed(iter(rows), "the rows").save_to_disk(str(tmp_path / "packed"))
    for name in ("data-00000-of-00001.arrow", "dataset_info.json"):
        assert (tmp_path / "packed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    loaded = datasets.load_from_disk(str(tmp_path / "packed"))
    assert loaded.to_list() == datasets.load_from_disk(str(tmp_path / "whole")).to_list()
    fewer = packed(rows[:4], "the rows")
    assert fewer._fingerprint != packed(rows[2:], "the rows")._fingerprint, "else `map` would reuse its cache"
