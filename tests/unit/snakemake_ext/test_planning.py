"""What Snakemake leaves out when it plans, and what it still does."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake.jobs import Job
from snakemake.logging import logger
from snakemake.resources import Resource
from snakemake_interface_logger_plugins.common import LogEvent

from rloo_pipeline.snakemake_ext import planning


def job(rule: str, number: int = 1) -> Any:
    """A job of a rule, as far as its report needs it."""
    return SimpleNamespace(
        rule=SimpleNamespace(name=rule),
        jobid=number,
        wildcards_dict={"round": "00001"},
        log=["update.log"],
        output=["metrics.json"],
        dag=SimpleNamespace(reason=lambda _: "Missing output files"),
    )


def test_a_dry_run_reports_the_first_job_of_each_rule_in_full(monkeypatch) -> None:
    full: list[int] = []

    def log_info(self: Any, indent: bool = False, printshellcmd: bool = True) -> None:
        full.append(self.jobid)

    monkeypatch.setattr(Job, "log_info", log_info)
    planning.report_briefly()
    planning.report_briefly()  # another workflow in this process
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(logger, "info", lambda _, extra: records.append(SimpleNamespace(**extra)))
    for number, rule in enumerate(["update", "gate", "update"]):
        Job.log_info(job(rule, number))
    assert full == [0, 1]
    [record] = records
    assert (record.event, record.jobid, record.rule_name) == (LogEvent.JOB_INFO, 2, "update")
    assert (record.reason, record.log, record.output) == ("Missing output files", ["update.log"], ["metrics.json"])


def test_functions_of_resources_are_not_inspected_for_every_job(monkeypatch) -> None:
    monkeypatch.delattr(Resource.evaluate, "_overwrite_params", raising=False)
    amount = Resource("mem_mb", lambda wildcards, attempt: 1000 * attempt)
    rule = SimpleNamespace(input=[], params=[], resources={"mem_mb": amount}, priority=0)
    planning.note_parameters(SimpleNamespace(workflow=SimpleNamespace(rules=[rule])))
    monkeypatch.setattr("snakemake.common.inspect.signature", lambda _: pytest.fail("inspected"))
    from snakemake.common import get_input_function_aux_params

    given = get_input_function_aux_params(amount.evaluate, {"attempt": 2, "threads": 1})
    assert amount.evaluate(None, **given).value == 2000
