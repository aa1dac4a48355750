"""The demo's task has no leak between its splits and no wrong lesson, and its model folder is reproducible."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo_pipeline.demo import calculation
from rloo_pipeline.demo.arithmetic import demonstrations, preferences, problems, split_of, work
from rloo_pipeline.demo.character_model import character_tokenizer, tiny_qwen3

SPLITS = ["train", "dev", "test"]
SOLUTIONS = ["chosen", "rejected"]


def operands(row: dict[str, Any]) -> frozenset[str]:
    return frozenset(re.split(r"[+-]", row["prompt"][0]["content"]))


def test_no_pair_of_operands_is_in_two_splits() -> None:
    pairs = {split: {operands(row) for row in problems(split, 300, digits=2)} for split in SPLITS}
    assert pairs["train"].isdisjoint(pairs["dev"] | pairs["test"])
    assert pairs["dev"].isdisjoint(pairs["test"])


def test_the_order_of_the_operands_does_not_decide_the_split() -> None:
    assert all(split_of(a, b) == split_of(b, a) for a in range(100, 140) for b in range(100, 140))


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right_and_problems_are_distinct(split: str) -> None:
    rows = problems(split, 500)
    assert all(str(eval(row["prompt"][0]["content"])) == row["answer"] for row in rows)
    assert len({row["prompt"][0]["content"] for row in rows}) == 500


def test_rows_depend_on_the_arguments_alone() -> None:
    assert problems("train", 50, seed=3) == problems("train", 80, seed=3)[:50] != problems("train", 50, seed=4)
    assert demonstrations("dev", 50, seed=3) == demonstrations("dev", 80, seed=3)[:50]
    assert problems("test", 3) == [
        {"prompt": [{"role": "user", "content": content}], "answer": answer}
        for content, answer in [("901+858", "1759"), ("980-337", "643"), ("734-609", "125")]
    ]


@pytest.mark.parametrize("task", [problems, calculation.problems])
def test_a_split_that_is_too_small_says_so(task: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="about"):
        task("dev", 1000, digits=1)
    with pytest.raises(ValueError, match="validation"):
        task("validation", 1)


def test_work_reads_from_the_right_with_carries() -> None:
    assert work(964, "-", 494) == "4-4-0=00;6-9-0=17;9-4-1=04"
    assert work(637, "+", 653) == "7+3+0=10;3+5+1=09;6+6+0=12"


def test_worked_demonstrations_follow_from_their_columns() -> None:
    for row, problem in zip(demonstrations("train", 500, worked_share=1), problems("train", 500), strict=True):
        [(columns, answer)] = re.findall(r"^<think>(.+)</think>(\d+)$", row["completion"][0]["content"])
        a, sign, b = re.split("([+-])", problem["prompt"][0]["content"])
        carry, read = 0, ""
        for column, x, y in zip(columns.split(";"), reversed(a), reversed(b), strict=True):
            terms, result = column.split("=")
            assert terms == f"{x}{sign}{y}{sign}{carry}"
            total, carry = eval(terms), int(result[0])
            assert total == (int(result) if sign == "+" else int(result[1]) - 10 * carry)
            read = result[1] + read
        assert row["prompt"] == problem["prompt"]
        assert int(f"{carry}{read}") == int(answer) == int(problem["answer"])


@pytest.mark.parametrize("worked_share", [0.0, 0.3, 1.0])
def test_the_share_of_worked_demonstrations_is_the_one_asked_for(worked_share: float) -> None:
    contents = [row["completion"][0]["content"] for row in demonstrations("train", 2000, worked_share=worked_share)]
    assert sum("=" in content for content in contents) / 2000 == pytest.approx(worked_share, abs=0.04)


def test_every_demonstration_survives_the_tokenizer() -> None:
    tokenizer = character_tokenizer()
    for row in demonstrations("train", 300):
        content = row["completion"][0]["content"]
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        conversation = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
        ids = tokenizer(conversation).input_ids
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(tokenizer(content).input_ids, skip_special_tokens=True) == content
        assert tokenizer.decode(ids) == conversation
        assert ids[: len(tokenizer(prompt).input_ids)] == tokenizer(prompt).input_ids
        assert ids.count(tokenizer.eos_token_id) == 2
        assert ids[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_a_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    for name, seed in [("first", 1), ("again", 1), ("other", 2)]:
        tiny_qwen3(tmp_path / name, seed)
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert all((tmp_path / "first" / f).read_bytes() == (tmp_path / "again" / f).read_bytes() for f in files)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "other")]
    assert weights[0] != weights[1]


def test_the_folder_loads_like_any_other_model(tmp_path: Path) -> None:
    tiny_qwen3(tmp_path, seed=0)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "qwen3"
    assert len(tokenizer) == model.config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.chat_template


@pytest.mark.parametrize("signs", ["+", "-"])
def test_one_solution_of_a_preference_is_right_and_the_other_has_a_different_digit(signs: str) -> None:
    rows, asked = preferences("train", 300, signs=signs), problems("train", 300, signs=signs)
    for row, problem in zip(rows, asked, strict=True):
        right, wrong = (re.findall("<think>(.*)</think>(.*)", row[name][0]["content"])[0] for name in SOLUTIONS)
        assert (row["prompt"], right[1]) == (problem["prompt"], problem["answer"])
        changed = [sum(map(str.__ne__, *parts)) for parts in zip(right, wrong, strict=True) if parts[1]]
        assert set(changed) in ({1}, {0, 1})
