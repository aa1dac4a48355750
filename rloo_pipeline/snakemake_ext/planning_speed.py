"""Snakemake plans many rounds in less time: what it does anew for every job is done once, or not at all.

Snakemake 9.27 inspects the signatures of a rule's functions for every job. In a dry run it also formats the command of
each job three times, with its params, though the display shows none of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any


def note_parameters(rules: Iterable[Any]) -> None:
    """Notes the parameters of all functions in the inputs, params, resources and priorities of Snakemake's rules.

    Snakemake itself has a way to name a function's parameters, which its `subpath` uses.
    """
    from snakemake.common import get_function_params, overwrite_function_params
    from snakemake.resources import Resource

    for function in {id(function): function for rule in rules for function in _functions(rule)}.values():
        overwrite_function_params(function, get_function_params(function))
    # the method by which resources call their functions, as it is seen on an object
    overwrite_function_params(Resource.evaluate, get_function_params(Resource("any", 1).evaluate))


def _functions(rule: Any) -> Iterator[Any]:
    """The plain functions of a rule; Snakemake wraps those of inputs in a string, those of resources in an object."""
    values = [*rule.input, *rule.params, *rule.resources.values(), rule.priority]
    for value in values:
        value = getattr(value, "_file", value)
        value = getattr(value, "callable", None) or getattr(value, "_evaluator", None) or value
        if inspect.isfunction(value):
            yield value


def report_briefly() -> None:
    """Makes a dry run report only the first job of each rule in full, and of the others only what `rloo` shows.

    The first one's command is formatted, so a mistake in a rule's command is found as before.
    """
    from snakemake.jobs import Job
    from snakemake.logging import logger
    from snakemake_interface_logger_plugins.common import LogEvent

    report_fully = Job.log_info
    if report_fully.__module__ == __name__:
        return
    seen: set[str] = set()

    def log_info(job: Any, *options: Any, **named: Any) -> None:
        if job.rule.name not in seen:
            seen.add(job.rule.name)
            report_fully(job, *options, **named)
            return
        shown = {
            "jobid": job.jobid,
            "rule_name": job.rule.name,
            "wildcards": job.wildcards_dict,
            "log": job.log,
            "reason": str(job.dag.reason(job)),
            "output": job.output,
        }
        logger.info(None, extra={"event": LogEvent.JOB_INFO, **shown})

    Job.log_info = log_info
