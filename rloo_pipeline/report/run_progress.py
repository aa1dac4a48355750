"""Reads a run's progress from its files: jobs that are done, running and pending, ends of rounds, a completion.

A job's log appears when it starts, its complete output when it ends. A log without output therefore belongs to a job
that is running, that failed (the last line is the error), or that was killed (the log stays silent).
"""

import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rloo_pipeline.artifacts import lineage
from rloo_pipeline.artifacts.model_files import policy_folder
from rloo_pipeline.config.run_jobs import RunJob, jobs_after_rounds, jobs_before_rounds, jobs_of_round
from rloo_pipeline.errors import UserError
from rloo_pipeline.judging.run_files import BY_SEED, RunFiles, is_finished, metrics_of, tail_of
from rloo_pipeline.stages.table import ROWS

SILENT = 300.0
"""Seconds without a new line after which a log is highlighted."""
SHOWN = [row.rule for row in ROWS if row.watched]
LAST_LINES = 65536
"""Number of bytes at the end of a log in which the stage's last line is searched, since engines print there too."""
LINE = re.compile(r"^\S+ \S+ (?P<level>[A-Z]+) rloo(?P<part>\.\w+)?: (?P<text>.*)$", re.MULTILINE)
"""Pattern of a line that the stage itself logged."""


class Working(NamedTuple):
    """A job that has started and not ended."""

    job: RunJob
    last_line: str
    silent: float
    """Seconds since its log's last line."""
    failed: bool


class Stage(NamedTuple):
    """Job counts of a stage."""

    name: str
    done: int
    working: int
    total: int


class Sample(NamedTuple):
    """A completion of the latest scored round."""

    round: int
    prompt: str
    completion: str
    reward: float | None


class Progress(NamedTuple):
    """The progress of a run."""

    stages: list[Stage]
    working: list[Working]
    finished: bool


def progress_of(run: RunFiles) -> Progress:
    """Reads the progress of a run from its files."""
    past, config = len(run.rounds), run.config
    before, after = _shown(jobs_before_rounds(config)), _shown(jobs_after_rounds(config))
    if not (run.folder / "selection.json").exists():  # an experiment has its selection in its own folder
        after = [job for job in after if job.stage not in BY_SEED]
    in_round = Counter(job.stage for job in _shown(jobs_of_round(config, 1)))
    once = Counter(job.stage for job in [*before, *after])
    total = {**once, **{stage: config.rounds * count for stage, count in in_round.items()}}
    done = Counter({stage: past * count for stage, count in in_round.items()})
    # earlier rounds are done, later ones have not begun
    begun = range(past + 1, min(past + 1 + config.rollout.lag, config.rounds) + 1)
    jobs = []
    for job in [*before, *(job for number in begun for job in _shown(jobs_of_round(config, number))), *after]:
        if run.is_current(run.folder / job.output, job.policy):
            done[job.stage] += 1
        elif working := _working(run.folder, job):
            jobs.append(working)
    running = Counter(working.job.stage for working in jobs if not working.failed)
    stages = [Stage(name, done[name], running[name], total[name]) for name in SHOWN if name in total]
    return Progress(stages, jobs, not jobs and is_finished(run.folder, config))


def _shown(jobs: Iterable[RunJob]) -> list[RunJob]:
    return [job for job in jobs if job.stage in SHOWN]


def _working(run: Path, job: RunJob) -> Working | None:
    """The job's state, if its log shows that it has started and not ended."""
    try:
        lines = list(LINE.finditer(tail_of(run / job.log, LAST_LINES)))
        changed = (run / job.log).stat().st_mtime
    except OSError:
        return None
    if lines and lines[-1]["part"] == ".time" and lines[-1]["text"].startswith("took"):
        return None  # a log that the job left when it ran before; its output was deleted
    own = [line for line in lines if not line["part"]]
    last = own[-1]["text"] if own else ""
    return Working(job, last, max(0.0, time.time() - changed), bool(own) and own[-1]["level"] == "ERROR")


def seconds_per_round(run: RunFiles) -> float | None:
    """Median duration of the latest rounds, by the modification times of metrics.json; round 1 begins with policy 0. Of
    two middle values it takes the shorter, since pauses between calls only make rounds longer.
    """
    times = [end_of(run, number) for number in range(max(0, len(run.rounds) - 10), len(run.rounds) + 1)]
    steps = [after - before for before, after in pairwise(times) if before and after and after > before]
    return statistics.median_low(steps) if steps else None


def end_of(run: RunFiles, number: int) -> float | None:
    """End of a round in seconds since 1970; round 0 ends with policy 0. None if the file does not exist."""
    file = metrics_of(run.folder, number) if number else policy_folder(run.folder, 0)
    try:
        return file.stat().st_mtime
    except OSError:
        return None


def sample_of(run: RunFiles) -> Sample | None:
    """A completion of the latest scored round, drawn with the seed; None if there is none or pyarrow is missing."""
    for number in (len(run.rounds) + 1, len(run.rounds)):
        try:
            if number and (sample := _sample(run, number)):
                return sample
        except (UserError, OSError, ImportError):
            continue
    return None


def _sample(run: RunFiles, number: int) -> Sample | None:
    from rloo_pipeline.artifacts import tables
    from rloo_pipeline.artifacts.prompt_set import PromptSet, content_text

    folder = lineage.round_folder(run.folder, number)
    if not run.is_current(folder / "scores" / "000.parquet", run.config.rollout.policy_of(number)):
        return None
    scores = tables.read(folder / "scores" / "000.parquet", "scores", ["prompt_id", "reward"])
    if not len(scores):  # no group of the shard has ended (rollout.token_budget)
        return None
    index = random.Random(f"{run.config.seed} {number}").randrange(len(scores))
    rollouts = tables.read(folder / "rollouts" / "000.parquet", "rollouts", ["prompt_id", "completion"])
    prompt_id = rollouts["prompt_id"][index].as_py()
    prompt = PromptSet(run.folder / "prompts" / "train").by_id([prompt_id])[prompt_id]["prompt"]
    last = prompt[-1]["content"] if isinstance(prompt, list) and prompt else prompt  # the last message of a chat
    return Sample(number, content_text(last), rollouts["completion"][index].as_py(), scores["reward"][index].as_py())
