"""The chat template of a model cannot stop a stage without an error."""

import signal
import time
import tracemalloc
from pathlib import Path

import pytest
import trl

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.artifacts.prompt_set import as_dataset
from rloo_pipeline.config import Dataset
from rloo_pipeline.data import prompting
from rloo_pipeline.data.prompting import encode
from rloo_pipeline.errors import UserError
from rloo_pipeline.rollout import templating
from rloo_pipeline.rollout.templating import PromptParts

DATASET = Dataset.model_validate({"train": {"path": "a.jsonl"}, "eval": {"path": "b.jsonl"}})
MESSAGES = [{"role": "user", "content": "1 + 1"}]
LOOP = "{% for _ in range(99999) %}" * 4 + "{% endfor %}" * 4


def test_a_template_without_an_end_is_an_error(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(prompting, "TEMPLATE_SECONDS", 0.3)
    tokenizer = Policy(tiny_model).tokenizer
    tokenizer.chat_template = LOOP
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^a row: the chat template failed on .*took over 0\.3 s.*correct it"):
        encode(MESSAGES, DATASET, tokenizer, "a row")
    assert time.monotonic() - began < 30


def test_a_template_that_writes_without_measure_is_an_error(tiny_model) -> None:
    tokenizer = Policy(tiny_model).tokenizer
    tokenizer.chat_template = "{{ 'a' * 10000001 }}"
    with pytest.raises(UserError, match=r"^a row: a prompt has 10,000,001 characters, but at most 10,000,000 can"):
        encode(MESSAGES, DATASET, tokenizer, "a row")
    with pytest.raises(UserError, match=r"^a row: a prompt has 10,000,001 characters"):
        encode("a" * 10_000_001, DATASET, tokenizer, "a row")


def test_a_token_that_was_added_to_the_tokenizer_alone_is_an_error_before_sampling(tiny_model) -> None:
    tokenizer = Policy(tiny_model).tokenizer
    rows = Policy(tiny_model).vocabulary
    tokenizer.add_tokens(["<new>"])
    assert encode(MESSAGES, DATASET, tokenizer, "a row"), "as long as no prompt has it"
    tokenizer.chat_template = "<new>" + tokenizer.chat_template
    with pytest.raises(UserError, match=rf"^a row: token '<new>' \(id {rows}\) has no row in .* \({rows} rows\); "):
        encode(MESSAGES, DATASET, tokenizer, "a row")


@pytest.mark.parametrize(("name", "date"), [("llama3_2", "26 Jul 2024"), ("gptoss", "2024-07-26")])
def test_no_prompt_has_the_date_of_the_day_on_which_it_was_made(name, date, tiny_model) -> None:
    tokenizer = Policy(tiny_model).tokenizer
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    assert date in prompting.render(MESSAGES, DATASET, tokenizer, "a row")
    dated = DATASET.model_copy(update={"chat_template_kwargs": {"date_string": "1 Jan 2000"}})
    assert ("1 Jan 2000" in prompting.render(MESSAGES, dated, tokenizer, "a row")) == (name == "llama3_2")


def test_the_deadline_ends_with_the_template(tiny_model) -> None:
    """Another use of SIGALRM, such as the time limit of this test, is not disturbed."""
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert encode(MESSAGES, DATASET, Policy(tiny_model).tokenizer, "a row")
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before


def test_a_kept_prompt_takes_the_memory_of_its_numbers_and_not_of_objects(tiny_model, monkeypatch) -> None:
    """A million prompts of 400 tokens would take 20 GB as lists."""
    monkeypatch.setattr(templating, "encode", lambda prompt, *_: [1000 + ord(letter) for letter in prompt])
    dataset = Dataset.model_validate({"train": {"path": "x"}, "eval": {"path": "x"}, "max_prompt_length": 1000})
    parts = PromptParts(templating.Templater(dataset, Policy(tiny_model)))
    parts.add("eval", [{"prompt": "5" * 500}], "eval")
    rows = [{"prompt": f"{number}+" * 100} for number in range(100)]
    tracemalloc.start()
    parts.add("train", [*rows, {"prompt": "5" * 500}], "train")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert parts.counts["train"] == {"rows": 101, "kept": 100, "also in eval": 1}
    assert held < 8 * sum(len(row["prompt_ids"]) for row in parts.rows["train"])
    assert len(rows) == 100, "`add` leaves the rows, which `rloo check` looks at"
    assert [row["prompt"] for row in parts.kept("train", rows, "train")] == [
        f"{number}+" * 100 for number in range(100)
    ]
    assert rows == [], "each is freed as its prompt is made"
    assert as_dataset(parts.rows["train"])[7]["prompt_ids"] == [1000 + ord(letter) for letter in "7+" * 100]


def test_a_prompt_that_differs_from_a_held_out_one_at_the_ends_of_lines_is_held_out(tiny_model) -> None:
    """Blanks inside a line may be the question, as in a maze."""
    source = {"path": "x"}
    dataset = Dataset.model_validate({"train": source, "eval": source, "user_prompt": "{question}"})
    parts = PromptParts(templating.Templater(dataset, Policy(tiny_model)))
    parts.add("eval", [{"question": "1+2\n+3"}], "eval")
    questions = ["1+2\n+3\n", " 1+2 \r\n+3", "1+2\n +3", "1+2+3", "12\n+3"]
    parts.add("train", [{"question": question} for question in questions], "train")
    assert [row["question"] for row in parts.rows["train"]] == questions[2:]
    assert parts.counts["train"] == {"rows": 5, "kept": 3, "also in eval": 2}


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_a_prompt_without_a_question_is_refused(prompt) -> None:
    """An empty cell of a CSV file is an empty text, which is not null."""
    prompting.check_question([], "a row without messages, which another check refuses")
    with pytest.raises(UserError, match=r"^a row: the last message of a prompt is empty; write it, or drop the row"):
        prompting.check_question([MESSAGES[0], {"role": "user", "content": prompt}], "a row")
