"""Patches Snakemake's planning so that it finds every job that must run, and plans many rounds faster.

Once Snakemake 9.27 knows that a job must run, it does not examine the jobs that depend on it, since they will run
anyway. But a job whose input from it is `ancient` will not. If such a job must run for its own reason, such as a
changed parameter or an older input, it is overlooked, and the call ends as if everything were done (see
snakemake#4166). With this patch, jobs behind an `ancient` input are examined like all others. Gates are such inputs: a
gate's verdict on a round does not make it sample or train again.

Snakemake 9.27 inspects the signatures of a rule's functions for every job. In a dry run it also formats the command of
each job three times, although the display shows none of it. With this patch, both happen once per rule.
"""

import atexit
import gc
import inspect
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from rloo_pipeline.runtime import guard, scratch
from rloo_pipeline.runtime.environment import prepare_jobs
from rloo_pipeline.snakemake_ext.logger import displays, is_only_one
from rloo_pipeline.snakemake_ext.replacing import replaces
from rloo_pipeline.snakemake_ext.snakemake_call import SnakemakeCall


def prepare(call: SnakemakeCall) -> None:
    """Prepares this process and the environment of its jobs.

    Raises:
        UserError: this Snakemake version is not supported.
    """
    scratch.claim(call.workflow.snakemake_tmp_dir)  # first: if killed before this, it leaves the folder behind
    guard.require("snakemake")
    # input functions name the previous round, which Snakemake resolves recursively, at a few frames per round
    sys.setrecursionlimit(1_000_000)
    # the DAG of many rounds has millions of long-lived objects, which the garbage collector should skip
    gc.set_threshold(1_000_000)
    atexit.register(gc.freeze)  # also when the process ends
    find_all_jobs()
    if call.dry_run:
        report_briefly(call)
    prepare_jobs()


def find_all_jobs() -> None:
    """Patches Snakemake's DAG in this process."""
    import snakemake.api  # noqa: F401 - must be imported before snakemake.dag
    from snakemake.dag import DAG

    @replaces(DAG, "bfs")
    def bfs(search: Any, self: Any, direction: Any, *jobs: Any, **options: Any) -> Iterator[Any]:
        # only for update_needrun; --omit-from makes the same call with another meaning
        if direction is self.depending and not options and not (self.omitrules or self.omitfiles):
            return jobs_that_follow(direction, *jobs)
        everywhere: Iterator[Any] = search(self, direction, *jobs, **options)
        return everywhere


def jobs_that_follow(depending: Any, *jobs: Any) -> Iterator[Any]:
    """Yields these jobs and the jobs that run because of them."""
    queue = deque(jobs)
    visited = set(jobs)
    while queue:
        job = queue.popleft()
        yield job
        for behind, files in depending[job].items():
            if behind not in visited and not all(file.is_ancient for file in files):
                visited.add(behind)
                queue.append(behind)


def note_parameters(call: SnakemakeCall) -> None:
    """Stores the parameter names of all functions in the inputs, params, resources and priorities of rules.

    Snakemake has a mechanism for this, which its `subpath` uses.
    """
    from snakemake.common import get_function_params, overwrite_function_params
    from snakemake.resources import Resource

    for function in {id(function): function for rule in call.workflow.rules for function in _functions(rule)}.values():
        overwrite_function_params(function, get_function_params(function))
    # the bound method with which resources call their functions
    overwrite_function_params(Resource.evaluate, get_function_params(Resource("any", 1).evaluate))


def _functions(rule: Any) -> Iterator[Any]:
    """Yields the plain functions of a rule. Snakemake wraps those of inputs in a string, those of resources in an
    object.
    """
    values = [*rule.input, *rule.params, *rule.resources.values(), rule.priority]
    for value in values:
        value = getattr(value, "_file", value)
        value = getattr(value, "callable", None) or getattr(value, "_evaluator", None) or value
        if inspect.isfunction(value):
            yield value


def report_briefly(call: SnakemakeCall) -> None:
    """Gives the jobs of a dry run to the display. If it is the only logger, Snakemake itself reports just the first job
    of each rule.

    The command of that first job is formatted, so mistakes in a rule's command are still found.
    """
    from snakemake.jobs import Job

    shown, only_there, seen = displays(call), is_only_one(call), set[str]()

    @replaces(Job, "log_info")
    def log_info(report: Any, job: Any, *options: Any, **named: Any) -> None:
        for display in shown:
            display.planned_jobs.append(job)
        if job.rule.name not in seen or not only_there:
            seen.add(job.rule.name)
            report(job, *options, **named)
