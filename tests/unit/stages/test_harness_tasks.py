"""config/gsm8k-benchmark.yaml prompts GSM8K like Wei et al. 2022 and parses answers like they do."""

from typing import Any

import pytest
import yaml
from helpers import GSM8K, ROOT, gsm8k_rows, merged, needs_gsm8k

from rloo_pipeline.config.loading import validate
from rloo_pipeline.stages.harness import load_tasks

pytestmark = needs_gsm8k

FIRST = (
    "Q: There are 15 trees in the grove. Grove workers will plant trees in the grove today. After they are done, there "
    "will be 21 trees. How many trees did the grove workers plant today?\n"
)
ANSWER = "The answer is {}."


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The task of the file with the data on this machine, as the comment in the file describes."""
    files = ("gsm8k-tiny.yaml", "gsm8k-benchmark.yaml")
    laid_over: dict = {}
    for file in files:
        laid_over = merged(laid_over, yaml.safe_load((ROOT / "config" / file).read_text()))
    [name] = laid_over["evaluation"]["harness"]["tasks"]
    data = {part: str(GSM8K / f"{part}.jsonl") for part in ("train", "test")}
    local = {"task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": data}}
    laid_over["evaluation"]["harness"]["tasks"] = [local]
    config = validate(laid_over, " ".join(files))
    with pytest.MonkeyPatch.context() as patch:
        import datasets

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        [task] = load_tasks(config)[1].values()
    return task


def test_it_is_the_whole_test_set_with_eight_worked_examples(task: Any) -> None:
    docs, rows = list(task.eval_docs), gsm8k_rows("test.jsonl")
    assert [doc["question"] for doc in docs] == [row["question"] for row in rows]
    assert len(docs) == 1319
    prompt = task.fewshot_context(docs[0], task.config.num_fewshot)
    assert prompt.startswith(FIRST)
    assert prompt.count("\nA:") == 9
    assert prompt.count("The answer is") == 8
    assert prompt.endswith(f"\n\nQ: {rows[0]['question']}\nA:")
    assert task.config.generation_kwargs["do_sample"] is False


def test_an_answer_is_the_number_after_the_answer_is(task: Any) -> None:
    docs = list(task.eval_docs)[:50]
    for answer, right in (
        (lambda gold: f" So it is {gold}. {ANSWER.format(gold)}", 1.0),
        (lambda _: ANSWER.format(-7), 0.0),
    ):
        shares = []
        for doc in docs:
            gold = doc["answer"].rpartition("#### ")[2]
            request = task.construct_requests(doc, "", metadata=("gsm8k_cot", 0, 1))
            request.resps = [answer(gold)]
            task._instances = [request]
            task.apply_filters()
            shares.append(task.process_results(doc, [request.filtered_resps["strict-match"]])["exact_match"])
        assert set(shares) == {right}
