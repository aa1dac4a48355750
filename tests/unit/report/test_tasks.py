"""Rewards by task show which functions apply to which tasks."""

from pathlib import Path

import pytest
from helpers import mini, write_prompts
from synthetic_runs import completions_schema

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.config.loading import validate
from rloo_pipeline.errors import UserError
from rloo_pipeline.report import frame
from rloo_pipeline.report.tasks import Cell, of_run

TASKS = ["sums", "sums", "<b>code</b>"]
BEFORE = {"math": [0.0, 1.0, 0.0, 0.0, None, None], "code": [None, None, None, None, 1.0, None]}
AFTER = {"math": [1.0, 1.0, 1.0, 0.0, None, None], "code": [None, None, None, None, 1.0, 0.0]}


@pytest.fixture
def run(tmp_path) -> Path:
    """Three held-out prompts of two tasks, two completions each."""
    prompts = [{"prompt_id": f"p{n}", "prompt": "x", "prompt_ids": [1], "task": task} for n, task in enumerate(TASKS)]
    write_prompts(tmp_path / "prompts", prompts, "eval")
    for name, scores in (("warmstart", BEFORE), ("final", AFTER)):
        rows = []
        for place in range(6):
            row = {"prompt_id": f"p{place // 2}", "sample": place % 2, "prompt_ids": [1], "completion_ids": [2]}
            row |= {"completion": "x", "sampling_logps": [0.0], "finish_reason": "stop", "seed": 0}
            values = {tables.score_column(function): column[place] for function, column in scores.items()}
            scored = [value for value in values.values() if value is not None]
            rows.append(row | values | {"reward": sum(scored) if scored else None, "seconds": 0.0, "error": None})
        about = {"policy": name, "evaluated": name}
        write_json(tmp_path / "evaluation" / name / "summary.json", about)
        file = tmp_path / "evaluation" / name / "completions.parquet"
        tables.write(file, rows, completions_schema("math", "code"), "completions", **about)
    return tmp_path


def configuration(**report):
    rewards = [{"function": f"rloo_pipeline.rewards.answer:{name}", "name": name} for name in ("math", "code")]
    return validate(mini(rewards=rewards, report=report), "test").only("report")


def test_each_function_has_a_mean_and_a_share_of_none_by_task(run) -> None:
    sums, code = of_run(configuration(task_column="task"), run)
    assert (sums.name, sums.prompts, sums.completions) == ("sums", 2, 4)
    assert sums.functions["math"] == (Cell(0.25, 0.0), Cell(0.75, 0.0))
    assert sums.functions["code"] == (Cell(None, 1.0), Cell(None, 1.0))
    assert code.functions["code"] == (Cell(1.0, 0.5), Cell(0.5, 0.0))
    assert code.functions["reward"] == code.functions["code"]


def test_without_a_task_column_there_are_no_tasks(run) -> None:
    assert of_run(configuration(), run) == []


def test_a_missing_task_column_is_an_error_with_a_suggestion(run) -> None:
    with pytest.raises(UserError, match=r"report.task_column: .* no column 'tsk'; did you mean 'task'"):
        of_run(configuration(task_column="tsk"), run)


def test_the_table_on_the_page_escapes_the_names_of_tasks(run) -> None:
    config = configuration(task_column="task")
    template = frame.environment().get_template("tasks.html.j2")
    page = template.render(config=config, tasks=of_run(config, run))
    assert "&lt;b&gt;code&lt;/b&gt;" in page
    assert "<b>" not in page
    assert page.count("<tr>") == 1 + 2 * 3
    assert "section" not in template.render(config=config, tasks=[])
