"""GSM8K: a model built for its text, rewards that read its answers, and its configurations."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, gsm8k_rows, needs_gsm8k

from rloo_pipeline.config.loading import load
from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.format import answer_mark_reward
from rloo_pipeline.rewards.math import math_reward
from rloo_pipeline.seeds import rows_of_round

ROWS = [
    {
        "question": "Tom has 3 bags with 4 apples each. How many apples has he?",
        "answer": "He has 3*4 = <<3*4=12>>12.\n#### 12",
    },
    {
        "question": "A “café” sells 1,200 cups at $2.50. What does it earn?\u2028Naïve – 日本",
        "answer": "1,200 × $2.50 = $3,000.\n#### 3,000",
    },
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    return path


def small(folder: Path, corpus: Path, **options: Any) -> None:
    from rloo_pipeline.demo.text_model import text_qwen3

    settings = {"vocab_size": 300, "context": 64, "hidden_size": 16, "heads": 1, "head_dim": 16} | options
    text_qwen3(folder, 1, corpus=corpus.name, data_dir=str(corpus.parent), **settings)


def test_a_corpus_gives_the_same_bytes_in_another_process_with_other_threads(tmp_path: Path, corpus: Path) -> None:
    small(tmp_path / "here", corpus)
    code = "import sys, pathlib, test_gsm8k; test_gsm8k.small(*map(pathlib.Path, sys.argv[1:]))"
    environment = os.environ | {
        "RAYON_NUM_THREADS": "1",
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    subprocess.run([sys.executable, "-c", code, tmp_path / "there", corpus], env=environment, check=True, cwd=ROOT)
    files = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert "model.safetensors" in files
    assert all((tmp_path / "here" / f).read_bytes() == (tmp_path / "there" / f).read_bytes() for f in files)


def test_the_text_model_loads_with_transformers_and_its_tokenizer_is_lossless(tmp_path: Path, corpus: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    small(tmp_path / "model", corpus)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == model.config.vocab_size == 300
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    for text in [*ROWS[0].values(), *ROWS[1].values(), "<think>\n 1 </think>\n\n#### 7", "  tabs\t\r\nand\0 é 🦜 "]:
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert [len(tokenizer(tag).input_ids) for tag in ("<think>", "</think>", "<|im_end|>")] == [1, 1, 1]
    conversation = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    whole = tokenizer.apply_chat_template(conversation, tokenize=False)
    prompt = tokenizer.apply_chat_template(conversation[:1], tokenize=False, add_generation_prompt=True)
    assert whole == prompt + "4<|im_end|>"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, {}, "train.jsonl: the corpus .* cannot be read"),
        ('{"question": "q", "answr": "a"}', {}, "line 1 has no column 'answer'.*did you mean 'answr'"),
        ('{"question": "q", "answer": "a"}\n\nnot json', {}, "line 3: not JSON: Expecting value"),
        ('{"question": "q", "answer": "a"}', {"vocab_size": 200}, "vocab_size 200 is below the 261"),
    ],
)
def test_an_unusable_corpus_is_an_error(
    tmp_path: Path, corpus: Path, text: str | None, options: dict[str, Any], message: str
) -> None:
    corpus.unlink() if text is None else corpus.write_text(text)
    with pytest.raises(UserError, match=message):
        small(tmp_path / "model", corpus, **options)
    assert not (tmp_path / "model").exists()


BUILDERS = """
def with_data_dir(folder, seed, *, data_dir=None):
    folder.mkdir()
    (folder / "written").write_text(str(data_dir))

def without_data_dir(folder, seed, **options):
    folder.mkdir()
    (folder / "written").write_text(str(options))
"""


@pytest.mark.parametrize(
    ("builder", "options", "written"),
    [
        ("with_data_dir", {}, "{data}"),
        ("with_data_dir", {"data_dir": "own"}, "own"),
        ("without_data_dir", {"a": 1}, "{{'a': 1}}"),
    ],
)
def test_only_a_builder_with_the_parameter_gets_data_dir(
    tmp_path: Path, corpus: Path, builder: str, options: dict[str, Any], written: str
) -> None:
    from rloo_pipeline.config import Model
    from rloo_pipeline.data.building import build

    (tmp_path / "builders.py").write_text(BUILDERS)
    model = Model(build=f"{tmp_path / 'builders.py'}:{builder}", build_options=options)
    build(model, 0, str(corpus.parent), tmp_path / "model")
    assert (tmp_path / "model/written").read_text() == written.format(data=corpus.parent)


def test_a_failing_builder_is_an_error(tmp_path: Path) -> None:
    from rloo_pipeline.config import Model
    from rloo_pipeline.data.building import build

    (tmp_path / "builders.py").write_text(BUILDERS)
    for options, message in (
        ({"size": 3}, r"model\.build_options do not fit .*builders\.py:with_data_dir: .*size"),
        ({}, r"model\.build: .*builders\.py:with_data_dir raised FileNotFoundError: .* \(builders\.py, line 3\)"),
    ):
        with pytest.raises(UserError, match=message):
            build(
                Model(build=f"{tmp_path / 'builders.py'}:with_data_dir", build_options=options),
                0,
                None,
                tmp_path / "a" / "b",
            )


@needs_gsm8k
def test_every_gold_answer_of_gsm8k_matches_itself_and_no_other_number() -> None:
    gold = [row["answer"] for name in ("train.jsonl", "test.jsonl") for row in gsm8k_rows(name)]
    assert len(gold) == 8792
    numbers = [float(answer.rpartition("####")[2].replace(",", "")) for answer in gold]
    wrong = [
        f"{answer.rpartition('####')[0]}#### {number + 1:.0f}" for answer, number in zip(gold, numbers, strict=True)
    ]
    assert math_reward(gold, gold) == [1.0] * 8792
    assert math_reward(wrong, gold) == [0.0] * 8792
    assert answer_mark_reward(gold) == [1.0] * 8792


def test_only_the_timeout_warning_of_math_verify_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    math_reward(["#### 1"], ["#### 1"])
    logging.getLogger("math_verify.parser").warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("3*4 = 12\n#### 12", 1),
        ("#### -1,200.50\n", 1),
        ("3*4 = 12 #### 12", 0),
        ("#### 12\n#### 13", 0),
        ("#### 12\nor so", 0),
        ("#### twelve", 0),
        ("12", 0),
    ],
)
def test_the_answer_mark_counts_once_and_at_the_end(completion: str, reward: float) -> None:
    assert answer_mark_reward([completion]) == [reward]


def test_the_tiny_run_samples_every_problem() -> None:
    config = load(ROOT / "config/gsm8k-tiny.yaml")
    count = config.rollout.num_prompts
    rows = {row for number in range(1, config.rounds + 1) for row in rows_of_round(7473, count, number, config.seed)}
    assert len(rows) == 7473
    assert config.evaluation.num_prompts is None
    assert config.uses_reference


def test_the_qwen_configuration_reads_files_of_the_hub_and_uses_its_prompt_template(tmp_path: Path) -> None:
    import datasets

    from rloo_pipeline.data.prompting import prompt_of
    from rloo_pipeline.data.rows import read_rows

    config = load(ROOT / "config/gsm8k-qwen3-4b.yaml")
    front = "configs:\n- config_name: main\n  data_files:\n" + "".join(
        f"  - split: {split}\n    path: main/{split}-*\n" for split in ("train", "test")
    )
    (tmp_path / "main").mkdir()
    (tmp_path / "README.md").write_text(f"---\n{front}---\n")
    for split, row in zip(("train", "test"), ROWS, strict=True):
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / f"main/{split}-00000-of-00001.parquet")
    for source, row in zip((config.dataset.train, config.dataset.eval), ROWS, strict=True):
        assert read_rows(source, str(tmp_path)) == [row]
        [message] = prompt_of(row, config.dataset, "rows")
        assert message["content"].startswith(row["question"])
        assert message["content"].endswith("\\boxed{}.")
    assert config.dataset.chat_template_kwargs == {"enable_thinking": True}
    assert config.deepspeed.max_tokens_per_micro_batch > 512 + config.rollout.max_completion_length
