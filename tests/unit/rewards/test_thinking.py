"""thinking_reward counts sampled tokens."""

import json
from pathlib import Path

import pytest

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.thinking import thinking_reward

END = 151668
GRADES = [(0, -1.0), (1, 0.3), (9, 0.3), (10, 0.7), (29, 0.7), (30, 1.0), (1000, 1.0)]


@pytest.mark.parametrize(("count", "grade"), GRADES)
def test_the_score_depends_on_the_tokens_before_the_end_of_thinking(count: int, grade: float) -> None:
    ids = [*range(1000, 1000 + count), END, 5, 5, 5]
    assert thinking_reward([ids], end_think_id=END, question_bonus=0) == [grade]
    assert thinking_reward([[151667, *ids]], end_think_id=END, question_bonus=0) == [grade]
    qwen35 = [248068, *ids[:count], 248069]
    assert thinking_reward([qwen35], end_think_id=248069, question_bonus=0) == [grade]
    assert thinking_reward([[7, *ids]], end_think_id=END, start_think_id=7, question_bonus=0) == [grade]


def test_unfinished_thinking_counts_as_none_and_a_second_end_is_ignored() -> None:
    assert thinking_reward([[1] * 50, []], end_think_id=END, question_bonus=0) == [-1.0, -1.0]
    assert thinking_reward([[1] * 9 + [END] + [1] * 50 + [END]], end_think_id=END, question_bonus=0) == [0.3]


@pytest.mark.parametrize(("count", "grade"), [(9, 0.3), (10, 0.8), (29, 0.8), (30, 1.1)])
def test_a_question_in_the_thinking_adds_a_bonus_from_ten_tokens(count: int, grade: float) -> None:
    asking = [[30, *[1] * (count - 1), END, 2]]
    assert thinking_reward(asking, end_think_id=END, question_ids=[30, 31]) == [grade]
    after = [[*[1] * count, END, 30]]
    assert thinking_reward(after, end_think_id=END, question_ids=[30, 31])[0] == pytest.approx(
        grade - 0.1 * (count > 9)
    )


def test_every_number_is_an_option() -> None:
    options = {
        "short": 2,
        "long": 4,
        "none_reward": -3.0,
        "short_reward": 1.0,
        "medium_reward": 2.0,
        "long_reward": 3.0,
    }
    ids = [[1] * count + [END] for count in (0, 1, 2, 3, 4)]
    assert thinking_reward(ids, end_think_id=END, question_bonus=0.5, question_ids=[1], **options) == [
        *(-3.0, 1.0, 2.5, 2.5, 3.5)
    ]


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    from rloo_pipeline.demo.text_model import bpe_tokenizer

    texts = ["Is it three? It is not. Then what is it, four or five?"] * 50
    bpe_tokenizer(texts, 300, 512).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_tags_come_from_the_tokenizer_and_only_sampled_tokens_count(tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    texts = [
        *("Three.", "<think></think>3", "<think>\n\n \n</think>3", "<think>3?</think>3", "<think>It is three"),
        "<think>" + "It is three! It is not." * 9 + "</think>Is it?",
        "<think>" + "Is it three? It is not." * 9 + "</think>It is.",
    ]
    ids = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    path = str(tokenizer_folder)
    assert thinking_reward(ids, tokenizer_path=path) == [-1.0, -1.0, -1.0, 0.3, -1.0, 1.0, 1.1]
    # the same text in other tokens: only the tokens count
    spelled = [token for character in "It is three" for token in tokenizer(character)["input_ids"]]
    end = tokenizer.convert_tokens_to_ids("</think>")
    assert thinking_reward([[*spelled, end]], tokenizer_path=path) == [0.7]
    merged = list(tokenizer("It is three")["input_ids"])
    assert len(merged) < 10
    assert thinking_reward([[*merged, end]], tokenizer_path=path) == [0.3]


def test_an_adapter_uses_the_tokenizer_of_its_base(tokenizer_folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tokenizer_folder)}))
    assert thinking_reward([[]], tokenizer_path=str(adapter)) == [-1.0]


def test_missing_token_ids_are_errors(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    with pytest.raises(UserError, match="no end-of-think token is known; give the option end_think_id"):
        thinking_reward([[1]], question_bonus=0)
    with pytest.raises(UserError, match="give tokenizer_path or question_ids, or set question_bonus to 0"):
        thinking_reward([[1]], end_think_id=END)
    with pytest.raises(UserError, match="no such file; thinking_reward's tokenizer_path"):
        thinking_reward([[1]], tokenizer_path=str(tmp_path / "nowhere"))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="has no single token </think>; give thinking_reward the option end_think_id"):
        thinking_reward([[1]], tokenizer_path=str(tmp_path))
    with pytest.raises(UserError, match="must be from 1 to long"):
        thinking_reward([[1]], end_think_id=END, question_bonus=0, short=40)
