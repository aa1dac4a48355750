"""Explains the jobs of a dry run: why they would run, and how long they will take.

Snakemake's 3.5 kB of parameters become `report.title: A → B: 1 job`. Snakemake gives the reason for a job as one
string, which is parsed here (`Reason.__str__` in snakemake/jobs.py and `ParamsChange.__str__` in
snakemake/persistence). The time is estimated from jobs of the same kind in the same run.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rloo_pipeline.errors import counted
from rloo_pipeline.judging.run_files import stopped_after
from rloo_pipeline.report import jobs as report_jobs
from rloo_pipeline.report.jobs import JobRecord
from rloo_pipeline.report.live_run import clock

PARAMS = re.compile(
    r"Params have changed since last execution: Union of exclusive params before and now across all output: "
    r"(?P<changes>before: .* now: .*?) ?(?=; Software environment definition|$)",
    re.DOTALL,
)
NOTHING = "<nothing exclusive>"
SENTENCES = (
    ("Forced execution", "asked for by --force, --forceall or --forcerun"),
    ("Missing output files", "output missing"),
    ("Incomplete output files", "output incomplete"),
    ("Set of input files has changed", "other input files than in the last run"),
    ("Code has changed", "the rule has changed"),
    ("Software environment definition has changed", "the image has changed"),
)
FOLLOWS = "depends on a job that runs again"
LONGEST_VALUE = 60
"""Maximum number of characters of a value that are shown."""
MOST_CHANGES = 4
"""Maximum number of changed keys that are named per job."""
ALL_ROUNDS = 99_999


class PlannedJob(NamedTuple):
    """A job of a dry run."""

    rule: str
    reason: str
    """Why Snakemake runs the job, in its own words."""
    log: str | None = None
    """The job's log, if it writes one."""


def lines(jobs: Sequence[PlannedJob], runs: Sequence[Path]) -> Iterator[str]:
    """Yields the lines to print about the jobs of a dry run; none without jobs.

    Args:
        jobs: the jobs.
        runs: folders of the runs that they belong to.
    """
    if not jobs:
        return
    yield f"{counted(len(jobs), 'job')} would run:"
    yield from (f"  {line}" for line in explain(jobs))
    by_name = {str(run): run for run in runs}
    logs = ((by_name.get(job.log.partition("/logs/")[0]), job.log) for job in jobs if job.log)
    for run in runs:
        if (last := stopped_after(run)) is not None:
            yield f"{run}: a gate ended it after round {last}; later rounds run only if it lets them."
    yield planned_time((run, log) for run, log in logs if run)  # a user's own rules have no log in a run's folder
    yield "--logger-rloo-plain shows each job with its files and its command."


def explain(jobs: Iterable[PlannedJob]) -> list[str]:
    """One line per reason, with the number and the rules of its jobs.

    A job that has its own reason to run is counted there, not among those that depend on other jobs.
    """
    rules: dict[str, Counter[str]] = defaultdict(Counter)
    for job in jobs:
        rules["; ".join(_reasons(job.reason)) or FOLLOWS][job.rule] += 1
    in_order = sorted(rules.items(), key=lambda jobs: jobs[0] == FOLLOWS)
    return [f"{why}: {counted(count.total(), 'job')} ({_names(count)})" for why, count in in_order]


def _names(rules: Counter[str]) -> str:
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in rules.items())


def _reasons(reason: str) -> Iterator[str]:
    """The reasons for one job in words, without the reason that it depends on a job that runs again."""
    params = PARAMS.search(reason)
    rest = PARAMS.sub("", reason)
    yield from (text for start, text in SENTENCES if re.search(rf"(?:^|; ){start}", rest))
    if newer := re.search(r"(?:^|; )Updated input files: ([^;]+)", rest):
        yield f"newer input {_shortened(newer[1])}"
    if params:
        changes = list(_changes(params["changes"]))
        yield ", ".join(changes[:MOST_CHANGES])
        if len(changes) > MOST_CHANGES:
            yield f"{len(changes) - MOST_CHANGES} more keys"


def _changes(text: str) -> Iterator[str]:
    """Parses the differences in `before: A,B now: C,D`, which are lists of parameters in Python syntax."""
    sides = text.removeprefix("before: ").split(" now: ")
    for cut in range(1, len(sides)):
        try:
            before, now = (_literals(" now: ".join(half)) for half in (sides[:cut], sides[cut:]))
        except (ValueError, SyntaxError, MemoryError):
            continue
        yield from list(_differences(before, now)) or ["other parameters"]
        return
    yield "other parameters"


def _literals(text: str) -> list[Any]:
    return [] if text.strip() == NOTHING else list(ast.literal_eval(f"[{text}]"))


def _differences(before: list[Any], now: list[Any]) -> Iterator[str]:
    """The configuration keys that differ, and the stage's code if it differs: `source` is the only parameter that is a
    string.
    """
    old, new = dict(_flat(before)), dict(_flat(now))
    lines = list[str]()
    for key in sorted(old.keys() | new.keys()):
        old_value, new_value = (_value(values[key]) if key in values else "(not set)" for values in (old, new))
        if (key in old) != (key in new) or old[key] != new[key]:
            lines.append(f"{key[1]}: {old_value} → {new_value}")
    yield from dict.fromkeys(lines)  # the same change in several runs once
    if any(isinstance(value, str) for value in [*before, *now]):
        yield "the stage's source code has changed"


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
    return _shortened(value if isinstance(value, str) and value else repr(value))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def planned_time(logs: Iterable[tuple[Path, str]]) -> str:
    """Says how much work the jobs are, and how many of them have no measurement.

    Args:
        logs: for each job, the run's folder and the job's log, whose name tells the kind of job.
    """
    logs = list(logs)
    measured = {run: _by_kind(report_jobs.jobs_of(run, ALL_ROUNDS)) for run in {run for run, _ in logs}}
    known = [alike for run, log in logs if (alike := _similar_jobs(measured[run], run, log))]
    unknown = len(logs) - len(known)
    seconds = sum(fmean(job.seconds for job in alike) for alike in known)
    gpu_seconds = sum(fmean(job.seconds * job.gpus for job in alike) for alike in known)
    if not known:
        return "The time is unknown, since the run has not finished a similar job yet; `rloo plan` estimates it."
    gpus = f", {gpu_seconds / 3600:.2f} GPU-hours" if gpu_seconds else ""
    rest = f"; {unknown} of these jobs have no measurement yet" if unknown else ""
    hours = f"{seconds / 3600:.2f} hours{gpus}"
    return f"About {clock(seconds)} of work ({hours}), judging by similar jobs of this run{rest}."


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
