"""What Snakemake leaves out when it plans, and what it still does."""

from types import SimpleNamespace
from typing import Any

import pytest
from snakemake.jobs import Job
from snakemake.resources import Resource

from rloo_pipeline.snakemake_ext import planning


@pytest.mark.parametrize("alone", [True, False])
def test_the_display_gets_the_jobs_of_a_dry_run(monkeypatch, alone) -> None:
    """If it is the only logger, Snakemake reports the first job of each rule."""
    reported: list[int] = []

    def log_info(self: Any, indent: bool = False, printshellcmd: bool = True) -> None:
        reported.append(self.jobid)

    monkeypatch.setattr(Job, "log_info", log_info)
    display = SimpleNamespace(planned_jobs=[])
    monkeypatch.setattr(planning, "displays", lambda _: [display])
    monkeypatch.setattr(planning, "is_only_one", lambda _: alone)
    for _ in range(2):  # the second of another module in this process
        planning.report_briefly(SimpleNamespace())
    for number, rule in enumerate(["update", "gate", "update"]):
        Job.log_info(SimpleNamespace(rule=SimpleNamespace(name=rule), jobid=number))
    assert reported == ([0, 1] if alone else [0, 1, 2])
    assert [job.jobid for job in display.planned_jobs] == [0, 1, 2]


def test_functions_of_resources_are_not_inspected_for_every_job(monkeypatch) -> None:
    monkeypatch.delattr(Resource.evaluate, "_overwrite_params", raising=False)
    amount = Resource("mem_mb", lambda wildcards, attempt: 1000 * attempt)
    rule = SimpleNamespace(input=[], params=[], resources={"mem_mb": amount}, priority=0)
    planning.note_parameters(SimpleNamespace(workflow=SimpleNamespace(rules=[rule])))
    monkeypatch.setattr("snakemake.common.inspect.signature", lambda _: pytest.fail("inspected"))
    from snakemake.common import get_input_function_aux_params

    given = get_input_function_aux_params(amount.evaluate, {"attempt": 2, "threads": 1})
    assert amount.evaluate(None, **given).value == 2000
