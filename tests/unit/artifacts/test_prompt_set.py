"""Rows of prompts come back as they were stored, objects with their own keys; ordinary columns are plain Arrow."""

import datetime
from pathlib import Path

import datasets
import pytest
from helpers import write_prompts

from rloo_pipeline.artifacts.prompt_set import PromptSet, as_dataset, rows_of

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
