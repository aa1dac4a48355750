"""Explains the jobs of a dry run: why they would run, and how long they will take.

Snakemake's 3.5 kB of parameters become `report.title: A → B: 1 job`. The reasons for a job are its `Reason`
(snakemake/jobs.py). The time is estimated from jobs of the same kind in the same run.
"""

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from rloo_pipeline.errors import counted
from rloo_pipeline.judging.run_files import stopped_after
from rloo_pipeline.report import jobs as report_jobs
from rloo_pipeline.report.jobs import JobRecord
from rloo_pipeline.report.live_run import clock
from rloo_pipeline.snakemake_ext.failures import RULES

FORCED = "asked for by --force, --forceall or --forcerun"
SENTENCES = {
    "missing_output": "output missing",
    "incomplete_output": "output incomplete",
    "input_changed": "other input files than in the last run",
    "code_changed": "the rule has changed",
    "software_stack_changed": "the image has changed",
}
"""Attribute of Snakemake's `Reason` → words."""
NOT_SET = "(not set)"
"""Stands for the value of a key that only the other side has."""
CODE = "the code of the stage, or of your functions, has changed"
FOLLOWS = "depends on a job that runs again"
LONGEST_VALUE = 60
"""Maximum number of characters of a value that are shown."""
MOST_CHANGES = 4
"""Maximum number of changed keys that are named per job."""
ALL_ROUNDS = 99_999


def lines(jobs: Sequence[Any], runs: Sequence[Path]) -> Iterator[str]:
    """Yields the lines to print about the jobs of a dry run; none without jobs.

    Args:
        jobs: Snakemake's jobs.
        runs: folders of the runs that they belong to.
    """
    if not jobs:
        return
    yield f"{counted(len(jobs), 'job')} would run:"
    yield from (f"  {line}" for line in explain(jobs))
    if any(is_by_code(job.dag.reason(job)) for job in jobs):
        yield "If this package was updated, --rerun-triggers mtime input keeps what the version before has finished."
    newer = {Path(file) for job in jobs for file in newer_inputs(job.dag.reason(job))}
    if any(file.is_relative_to(run) for file in newer for run in runs):
        yield "If the run was copied without times, `rloo adopt` with the same configuration accepts its files instead."
    by_name = {str(run): run for run in runs}
    logs = ((by_name.get(job.log[0].partition("/logs/")[0]), job.log[0]) for job in jobs if job.log)
    for run in runs:
        if (last := stopped_after(run)) is not None:
            yield f"{run}: a gate ended it after round {last}; later rounds run only if it lets them."
    # a user's own rules have no log in a run's folder
    yield planned_time(((run, log) for run, log in logs if run), runs)
    yield "--logger-rloo-plain shows each job with its files and its command."


def explain(jobs: Iterable[Any]) -> list[str]:
    """One line per reason, with the number and the rules of its jobs.

    A job that has its own reason to run is counted there, not among those that depend on other jobs.
    """
    rules: dict[str, Counter[str]] = defaultdict(Counter)
    for job in jobs:
        why = "; ".join(_reasons(job.dag.reason(job))) or FOLLOWS
        rules[why][RULES.get(job.rule.name, job.rule.name)] += 1
    in_order = sorted(rules.items(), key=lambda jobs: jobs[0] == FOLLOWS)
    return [f"{why}: {counted(count.total(), 'job')} ({_names(count)})" for why, count in in_order]


def _names(rules: Counter[str]) -> str:
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in rules.items())


def _reasons(reason: Any) -> Iterator[str]:
    """The reasons for one job in words, without the reason that it depends on a job that runs again."""
    if reason.forced:
        yield FORCED
        return
    yield from (text for name, text in SENTENCES.items() if getattr(reason, name))
    if newer := newer_inputs(reason):
        yield f"newer input {_shortened(', '.join(sorted(newer)))}"
    if reason.params_changed:
        changes = _changes(reason.params_changed)
        yield ", ".join(changes[:MOST_CHANGES])
        if len(changes) > MOST_CHANGES:
            yield f"{len(changes) - MOST_CHANGES} more keys"


def newer_inputs(reason: Any) -> set[str]:
    """Input files that are newer than the output and that no job of this call makes."""
    return {*reason.updated_input} - {*reason.updated_input_run}


def _changes(params: Any) -> list[str]:
    """The differences between parameters, which Snakemake keeps in Python syntax."""
    with suppress(ValueError, SyntaxError, MemoryError):
        before, now = (list(map(ast.literal_eval, side)) for side in (params.only_old, params.only_new))
        if differences := list(_differences(before, now)):
            return differences
    return ["other parameters"]


def is_by_code(reason: Any) -> bool:
    """True if a job runs only because code or a rule has changed; see `is_by_user`."""
    changes = _changes(reason.params_changed) if reason.params_changed else []
    return bool(CODE in changes or reason.code_changed) and not is_by_user(reason)


def is_by_user(reason: Any) -> bool:
    """True if a job runs because of what the user did: forced it, replaced an input or the image, or gave a key another
    value. A key that another version of this package does not have does not count, but an entry of a list does.
    """
    changes = _changes(reason.params_changed) if reason.params_changed else []
    of_keys = any(change != CODE and (NOT_SET not in change or "[" in change.partition(":")[0]) for change in changes)
    return bool(reason.forced or newer_inputs(reason) or reason.software_stack_changed or of_keys)


def _differences(before: list[Any], now: list[Any]) -> Iterator[str]:
    """The configuration keys that differ, and the stage's code if it differs: `source` is the only parameter that is a
    string.
    """
    old, new = dict(_flat(before)), dict(_flat(now))
    lines = list[str]()
    for key in sorted(old.keys() | new.keys()):
        old_value, new_value = (_value(values[key]) if key in values else NOT_SET for values in (old, new))
        if (key in old) != (key in new) or old[key] != new[key]:
            lines.append(f"{key[1]}: {old_value} → {new_value}")
    yield from dict.fromkeys(lines)  # the same change in several runs once
    if any(isinstance(value, str) for value in [*before, *now]):
        yield CODE


def _flat(parameters: Iterable[Any]) -> Iterator[tuple[tuple[int, str], Any]]:
    """Yields dotted keys and values of all parameters that are mappings, or lists of mappings: one for each run. The
    number of the run is part of the key.
    """
    for parameter in parameters:
        mappings = parameter if isinstance(parameter, list) else [parameter]
        for number, mapping in enumerate(mappings):
            if isinstance(mapping, Mapping):
                yield from (((number, key), value) for key, value in _under("", mapping))


def _under(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _under(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value):
            yield from _under(f"{prefix}[{number}]", inner)
    else:
        yield prefix, value


def _value(value: Any) -> str:
    """Formats a value as in the configuration: true, null."""
    return _shortened(
        value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=repr)
    )


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def planned_time(logs: Iterable[tuple[Path, str]], runs: Iterable[Path] = ()) -> str:
    """Says how much work the jobs are, and how many of them have no measurement.

    Args:
        logs: for each job, the run's folder and the job's log, whose name tells the kind of job.
        runs: folders of all runs of the call; a new run of an experiment takes what the others took.
    """
    logs = list(logs)
    jobs = {
        run: report_jobs.jobs_of(run, ALL_ROUNDS, pages=True)
        for run in dict.fromkeys([*runs, *(run for run, _ in logs)])
    }
    measured, of_all = {run: _by_kind(jobs[run]) for run in jobs}, _by_kind(list(chain(*jobs.values())))
    alike = [_similar_jobs(measured[run], run, log) or _similar_jobs(of_all, run, log) for run, log in logs]
    known = [similar for similar in alike if similar]
    unknown = len(logs) - len(known)
    seconds = sum(fmean(job.seconds for job in similar) for similar in known)
    gpu_seconds = sum(fmean(job.seconds * job.gpus for job in similar) for similar in known)
    if not known:
        return "The time is unknown, since no similar job has finished yet; `rloo plan` estimates it."
    gpus = f", {gpu_seconds / 3600:.2f} GPU-hours" if gpu_seconds else ""
    verb = "has" if unknown == 1 else "have"
    rest = f"; {unknown} of these jobs {verb} no measurement yet" if unknown else ""
    hours = f"{seconds / 3600:.2f} hours{gpus}"
    return f"About {clock(seconds)} of work ({hours}), judging by similar jobs{rest}."


def _by_kind(jobs: Sequence[JobRecord]) -> dict[str, list[JobRecord]]:
    """Jobs by stage and by name of their log without numbers, such as `evaluate` and `evaluate/final`."""
    kinds: dict[str, list[JobRecord]] = defaultdict(list)
    for job in jobs:
        for kind in {job.stage, _kind(f"{job.stage}/{job.name}".rstrip("/"))}:
            kinds[kind].append(job)
    return kinds


def _similar_jobs(measured: dict[str, list[JobRecord]], run: Path, log: str) -> list[JobRecord]:
    """Jobs of the same kind as the one with this log, or all jobs of its stage if there are none."""
    name = Path(log).relative_to(run / "logs").with_suffix("")
    return measured.get(_kind(str(name))) or measured.get(name.parts[0], [])


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)
