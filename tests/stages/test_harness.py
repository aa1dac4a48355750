"""lm-eval runs on a policy with its vLLM backend, without network, and no field of its result depends on the clock."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from helpers import Round, done, rloo

from rloo_pipeline.artifacts.policy import Policy

pytestmark = pytest.mark.slow

TASK = {
    "task": "sums",
    "dataset_path": "json",
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def data_of_sums(folder: Path) -> dict:
    """The keys of a task with five sums."""
    rows = [{"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(100, 105)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}}}


@pytest.mark.long
def test_tasks_of_lm_eval_run_on_a_policy(tmp_path, tiny_model) -> None:
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(TASK | data_of_sums(tmp_path)))
    harness = {"include_path": str(tmp_path), "max_model_len": 64, "apply_chat_template": True}
    shorter = {"task": "sums", "generation_kwargs": {**TASK["generation_kwargs"], "max_gen_toks": 2}}
    model = shutil.copytree(tiny_model, tmp_path / "model")
    template = model / "chat_template.jinja"
    wrong = "enable_thinking != true or style != 'short' or strftime_now('%Y') != '2024'"
    wrong = f"{wrong} or messages[0]['content'] != 'Add.'"
    needs = f"{{% if {wrong} %}}{{{{ raise_exception('no variables') }}}}{{% endif %}}"
    template.write_text(needs + template.read_text())
    variables = {"chat_template_kwargs": {"enable_thinking": True, "style": "short"}, "system_prompt": "Add."}
    evaluation = {"harness": {"tasks": [shorter], **harness}}
    run = Round(tmp_path / "run", model, seed=2**70, evaluation=evaluation, dataset=variables)
    output = run.run / "evaluation" / "final" / "harness.json"
    log = f"--log={run.run / 'logs' / 'harness.log'}"
    arguments = ("--policy", model, "--name", "final", "--output", output, log)
    done("harness", *arguments)
    results = json.loads(output.read_text())
    assert results["policy"] == Policy(model).digest
    assert results["n-samples"]["sums"]["effective"] == 5
    assert 0 <= results["results"]["sums"]["exact_match,none"] <= 1
    assert not {"date", "total_evaluation_time_seconds", "git_hash", "pretty_env_info"} & results.keys()


def test_a_task_that_is_not_there_gives_a_one_line_error(tmp_path, tiny_model) -> None:
    run = Round(tmp_path / "run", tiny_model, evaluation={"harness": {"tasks": ["no_such_task"]}})
    outcome = rloo("stage-harness", "--output", run.run / "harness" / "tasks.json")
    assert outcome.returncode == 1
    assert "evaluation.harness.tasks: no_such_task cannot be loaded" in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dataset": {"chat_template_kwargs": {"enable_thinking": True}}}, "which leaves no room for thinking"),
        ({"update": {"lora": {"target_modules": ["lm_head"]}}}, "for which vLLM leaves out an adapter on lm_head"),
        ({"update": {"lora": {"target_modules": ".*(_proj|lm_head)"}}}, "for which vLLM leaves out an adapter"),
    ],
)
def test_a_task_that_scores_given_answers_is_refused_where_it_cannot(tmp_path, tiny_model, changes, why) -> None:
    kept = {key: TASK[key] for key in ("dataset_path", "test_split", "doc_to_text")}
    choices = {"task": "pick", "output_type": "multiple_choice", "doc_to_target": 0, "doc_to_choice": ["1", "2"]}
    scored = kept | choices | data_of_sums(tmp_path)
    evaluation = {"harness": {"tasks": [scored], "apply_chat_template": True}}
    run = Round(tmp_path / "run", tiny_model, evaluation=evaluation, **changes)
    outcome = rloo("stage-harness", "--output", run.run / "harness" / "tasks.json")
    assert outcome.returncode == 1
    assert f"evaluation.harness.tasks: pick scores given answers, {why}" in outcome.stderr
    assert "Traceback" not in outcome.stderr
